"""Asynchronous DiLoCo against a NumPy loop over what workers bring, in the order of their times."""

from __future__ import annotations

import numpy as np
import pytest
from sample_programs import SIZE, play

from labkit import AsynchronousDiLoCo
from labkit.network import Slowdown

PACES = (1.0, 1.37, 2.9)


@pytest.mark.parametrize("delayed", [1, 2, 3])
def test_the_momentum_waits_for_so_many(delayed: int) -> None:
    slow = {worker: Slowdown(compute=pace) for worker, pace in enumerate(PACES)}
    strategy = AsynchronousDiLoCo(3, delayed=delayed)
    _, scenes, _ = play(strategy, 3, network=None, steps=20, slow=slow)
    theta = np.zeros(4 * SIZE)
    momentum, buffer = np.zeros_like(theta), []
    # When whoever brings what, and where it began.
    under_way = [(3 * pace, worker, theta) for worker, pace in enumerate(PACES)]
    rounds, done = 3, 0
    while under_way:
        now, worker, begun = min(under_way, key=lambda each: each[:2])
        under_way = [each for each in under_way if each[1] != worker]
        local = begun
        for _ in range(3):
            local = local - 0.1 * (0.01 * local + worker + 1)
        buffer.append(begun - local)
        done += 3
        pushed = 0.0
        if len(buffer) == delayed:
            momentum = 0.9 * momentum + sum(buffer) / delayed
            pushed = 0.9 * momentum
        theta = theta - 0.7 * (pushed + buffer[-1] / delayed)
        if len(buffer) == delayed:
            buffer = []
        if rounds < 20:  # 60 steps in all
            rounds += 1
            under_way.append((now + 3 * PACES[worker], worker, theta))
    assert done == 60 == sum(scenes.steps.values())
    assert scenes.steps[0] > 2 * scenes.steps[2]
    np.testing.assert_allclose(scenes.held[3], theta, rtol=0, atol=1e-11)
