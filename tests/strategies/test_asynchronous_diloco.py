"""Test asynchronous DiLoCo against a NumPy loop that takes workers' results in order of time."""

from __future__ import annotations

import numpy as np
import pytest
from sample_programs import SIZE, play

from labkit import AsynchronousDiLoCo
from labkit.network import Slowdown

PACES = (1.0, 1.37, 2.9)


@pytest.mark.parametrize(("delayed", "period"), [(1, 3), (2, 3), (3, 3), (2, 7), (1, 50)])
def test_the_momentum_waits_for_so_many(delayed: int, period: int) -> None:
    """Test sixty steps of three workers in any period, of which the last may be shorter."""
    slow = {worker: Slowdown(compute=pace) for worker, pace in enumerate(PACES)}
    strategy = AsynchronousDiLoCo(period, momentum_delay=delayed)
    _, scenes, _ = play(strategy, 3, network=None, steps=20, slow=slow)
    theta = np.zeros(4 * SIZE)
    momentum, buffer = np.zeros_like(theta), []
    # Each entry has the time of a worker's next result, and the weights that it started from.
    first = min(period, 20)
    under_way = [(first * pace, worker, theta, first) for worker, pace in enumerate(PACES)]
    left, done = 60 - 3 * first, 0
    while under_way:
        now, worker, begun, steps = min(under_way, key=lambda each: each[:2])
        under_way = [each for each in under_way if each[1] != worker]
        local = begun
        for _ in range(steps):
            local = local - 0.1 * (0.01 * local + worker + 1)
        buffer.append(begun - local)
        done += steps
        pushed = 0.0
        if len(buffer) == delayed:
            momentum = 0.9 * momentum + sum(buffer) / delayed
            pushed = 0.9 * momentum
        theta = theta - 0.7 * (pushed + buffer[-1] / delayed)
        if len(buffer) == delayed:
            buffer = []
        if granted := min(period, left):
            left -= granted
            under_way.append((now + granted * PACES[worker], worker, theta, granted))
    assert done == 60 == sum(scenes.steps.values())
    assert period > 3 or scenes.steps[0] > 2 * scenes.steps[2]
    np.testing.assert_allclose(scenes.held[3], theta, rtol=0, atol=1e-11)
