"""Test elastic averaging against NumPy loops with the momentum of the paper."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import sample_programs
from sample_programs import SIZE, Numbers, play

from labkit import ElasticAveraging, Experiment
from labkit.common.errors import InvalidInput
from labkit.network import Slowdown

ALPHA, RATE = 0.2, 0.1
PACES = (1.0, 1.3, 2.9)  # slowdowns with which no two workers finish at the same time


class Nesterov(Numbers):
    """Numbers with Keras's Nesterov momentum: v ← δ v - η g, w ← w + δ v - η g."""

    moves: ClassVar[dict[int, np.ndarray]] = {}
    share = 0.0

    def update(self, holder: int, gradient: np.ndarray, rate: float = 1.0) -> np.ndarray:
        self.moves[holder] = self.share * self.moves.get(holder, 0.0) - RATE * gradient
        self.held[holder] = self.held[holder] + self.share * self.moves[holder] - RATE * gradient
        return self.held[holder]


def gradient(weights: np.ndarray, worker: int) -> np.ndarray:
    """Return the gradient that `Numbers` computes."""
    return 0.01 * weights + (worker + 1)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("center", ["server", "allreduce"])
def test_springs_pull_as_the_paper_says(
    center: Any, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_programs, "Numbers", Nesterov)
    monkeypatch.setattr(Nesterov, "moves", {})
    monkeypatch.setattr(Nesterov, "share", momentum)
    strategy = ElasticAveraging(ALPHA, period=3, momentum=momentum, center=center)
    slow = {worker: Slowdown(compute=pace) for worker, pace in enumerate(PACES)}
    _, scenes, _ = play(strategy, 3, network=None, steps=20, slow=slow)
    # Keep each worker's x, and its step by momentum alone, after which the gradient is taken.
    places, moves = [np.zeros(4 * SIZE)] * 3, [np.zeros(4 * SIZE)] * 3
    centre = np.zeros(4 * SIZE)
    steps = [(step * pace, step, worker) for step in range(21) for worker, pace in enumerate(PACES)]
    if center == "allreduce":  # in the order of steps, whatever time they take
        steps = [(step, step, worker) for _, step, worker in steps]
    together = centre
    for _, step, worker in sorted(steps):
        ahead = places[worker] + momentum * moves[worker]
        pull = 0.0
        if (step and step % 3 == 0) or step == 20:
            together = centre if worker == 0 or center == "server" else together
            pull = ALPHA * (ahead - together)
            centre = centre + pull
        if step < 20:
            moves[worker] = momentum * moves[worker] - RATE * gradient(ahead, worker)
            places[worker] = places[worker] - pull + moves[worker]
    (held,) = strategy.copies(3)
    np.testing.assert_allclose(scenes.held[held], centre, rtol=0, atol=1e-11)


def test_its_momentum_is_that_of_kerass_sgd() -> None:
    strategy = ElasticAveraging(momentum=0.9)
    asked = Experiment(dataset="digits", workers=2, optimizer="sgd", strategy=strategy)
    assert strategy.optimizer_options_of(asked) == {"momentum": 0.9, "nesterov": True}


@pytest.mark.parametrize(
    ("fields", "optimizer", "said"),
    [
        ({"alpha": 0.6, "center": "allreduce"}, "sgd", "beyond that mean; use alpha up to 0.5"),
        ({"momentum": 0.9}, "adam", "requires plain SGD"),
        ({"compressor": "Int8"}, "sgd", "has no 'compressor'"),
        ({"algorithm": "ring"}, "sgd", "selects an allreduce, but center='server' uses none"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    fields: dict[str, Any], optimizer: str, said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        Experiment(
            dataset="digits", workers=2, optimizer=optimizer, strategy=ElasticAveraging(**fields)
        )
