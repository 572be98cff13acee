"""Gossip against NumPy loops, on rings, matchings, exponential and directed graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_programs import SIZE, Numbers, play

from labkit import Experiment, Gossip, ParameterAveraging
from labkit.common.errors import InvalidInput
from labkit.network import Slowdown

# Of a directed graph: the first worker tells both others, who tell one each.
DIRECTED = ((0.4, 0.0, 0.5), (0.3, 0.7, 0.0), (0.3, 0.3, 0.5))
TOPOLOGIES: list[Any] = ["ring", "exponential", "random_pairs", DIRECTED]


def gradient(weights: np.ndarray, worker: int) -> np.ndarray:
    """As `Numbers` has them."""
    return 0.01 * weights + (worker + 1)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["ring", "exponential", "pairs", "directed"])
def test_workers_mix_as_the_formula_says(topology: Any) -> None:
    strategy = Gossip(topology)
    _, scenes, _ = play(strategy, 3, steps=20)
    own, shares = [np.zeros(4 * SIZE)] * 3, np.ones(3)
    for step in range(20):
        mixing = strategy.mixing(3, step)
        debiased = [each / share for each, share in zip(own, shares, strict=True)]
        own = [
            sum(mixing[to, source] * own[source] for source in range(3))
            - 0.1 * gradient(debiased[to], to)
            for to in range(3)
        ]
        shares = mixing @ shares
    for worker in range(3):
        expected = own[worker] / shares[worker]
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-12)


@given(st.sampled_from(["ring", "exponential", "random_pairs"]), st.integers(1, 17), st.data())
def test_every_step_keeps_the_mean(topology: Any, workers: int, data: st.DataObject) -> None:
    mixing = Gossip(topology).mixing(workers, data.draw(st.integers(0, 9)), 3)
    np.testing.assert_allclose(mixing.sum(0), 1.0)
    np.testing.assert_allclose(mixing.sum(1), 1.0)
    assert (mixing >= 0).all()
    assert (np.diag(mixing) > 0).all()


def test_on_the_complete_graph_all_have_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "gradient", constant)
    third = ((1 / 3,) * 3,) * 3
    _, scenes, _ = play(Gossip(third), 3, steps=2)
    # After the first step worker k is at -(k + 1) / 10; the second mixes that, and adds it.
    for worker in range(3):
        expected = -0.1 * (1 + 2 + 3) / 3 - 0.1 * (worker + 1)
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-12)


def constant(self: Numbers, worker: int, weights: np.ndarray) -> Any:
    from labkit.programs import Gradient

    step = self.steps[worker] = self.steps.get(worker, -1) + 1
    return Gradient(np.full_like(weights, worker + 1.0), 2, 0.5, step)


PACES = (1.0, 1.37, 2.9)


def test_active_workers_go_to_the_passive_one() -> None:
    """Whoever comes when: three workers of 20 steps together, of which only one is passive."""
    slow = {worker: Slowdown(compute=pace) for worker, pace in enumerate(PACES)}
    strategy = Gossip("ring", asynchronous=True)
    _, scenes, _ = play(strategy, 3, network=None, steps=20, slow=slow)
    held = [np.zeros(4 * SIZE)] * 3
    granted, done = 3, 0
    # Who ends a step when, at which weights it computes, and what it will take the mean with.
    ends: list[Any] = []
    begins = [(0.0, worker) for worker in range(3)]
    while begins or ends:
        if begins and (not ends or begins[0] < ends[0][:2]):
            now, worker = begins.pop(0)
            last = granted == 60
            granted += not last
            heard = held[1]
            if worker != 1:
                held[1] = (held[1] + held[worker]) / 2
            ends = sorted(
                [*ends, (now + PACES[worker], worker, held[worker], heard, last)],
                key=lambda end: end[:2],
            )
            continue
        now, worker, at, heard, last = ends.pop(0)
        if worker != 1:
            held[worker] = (held[worker] + heard) / 2
        held[worker] = held[worker] - 0.1 * gradient(at, worker)
        done += 1
        if not last:
            begins = sorted([*begins, (now, worker)])
    assert done == 60 == sum(scenes.steps.values())
    assert scenes.steps[0] > 2 * scenes.steps[2]
    for number, worker in ((0, 0), (3, 1), (2, 2)):  # the passive one's weights are at its ear
        np.testing.assert_allclose(scenes.held[number], held[worker], rtol=0, atol=1e-11)


def test_one_slow_worker_holds_up_nobody() -> None:
    """An epoch is at least 4 times as fast as by allreduce, where one is 10 times slower."""
    slow = {7: Slowdown(compute=10.0)}
    together, _, _ = play(ParameterAveraging(1), 8, steps=20, slow=slow)
    for topology in ("ring", "random_pairs"):
        apart, _, _ = play(Gossip(topology, asynchronous=True), 8, steps=20, slow=slow)
        assert together.now > 4 * apart.now


def test_gaps_are_those_of_the_eigenvalues() -> None:
    """Of a ring of n: 1 - (1 + 2 cos(2π/n)) / 3; half of who is k before: cos²(πkj/n)."""
    for workers in (4, 8, 16):
        expected = 1 - (1 + 2 * np.cos(2 * np.pi / workers)) / 3
        assert Gossip("ring").spectral_gap(workers) == pytest.approx(expected, abs=1e-9)
        away = 2 ** np.arange(np.log2(workers))[:, None]
        squares = np.cos(np.pi * away * np.arange(1, workers) / workers) ** 2
        expected = 1 - np.sqrt(squares.mean(axis=0).max())
        assert Gossip("exponential").spectral_gap(workers) == pytest.approx(expected, abs=1e-9)
    for workers in (5, 6):  # of random pairs the mean over many draws
        strategy = Gossip("random_pairs")
        drawn = [strategy.mixing(workers, step) for step in range(4_000)]
        mean = np.mean([each.T @ each for each in drawn], axis=0)
        expected = 1 - np.sqrt(np.linalg.eigvalsh(mean)[-2])
        assert strategy.spectral_gap(workers) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topology": ((0.5, 0.2), (0.5, 0.5))}, "add up to 1, not to 1, 0.7"),
        ({"topology": ((0.5, 0.5), (0.5,))}, "as many rows as columns"),
        ({"topology": DIRECTED}, "topology has 3 rows, but workers=2"),
        ({"topology": "exponential", "asynchronous": True}, "is no graph between two such kinds"),
        ({"compressor": "Int8"}, "Gossip has no 'compressor'"),
    ],
)
def test_what_is_no_topology_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Experiment(dataset="digits", workers=2, strategy=Gossip(**fields))
