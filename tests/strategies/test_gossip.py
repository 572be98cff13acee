"""Test gossip against NumPy loops, on rings, matchings, exponential and directed graphs."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import sample_programs
from hypothesis import given
from hypothesis import strategies as st
from sample_programs import SIZE, Numbers, play

from labkit import Experiment, Gossip, ParameterAveraging
from labkit.common.errors import InvalidInput
from labkit.network import Slowdown
from labkit.programs import Gradient, Message
from labkit.programs.virtual_runtime import VirtualRuntime

# In this directed graph, worker 0 sends to both others, and each of them sends to one.
DIRECTED = ((0.4, 0.0, 0.5), (0.3, 0.7, 0.0), (0.3, 0.3, 0.5))
PUSHED = ((0.5, 0.0, 0.2, 0.0), (0.2, 0.4, 0.0, 0.0), (0.0, 0.6, 0.8, 0.3), (0.3, 0.0, 0.0, 0.7))
DOUBLY = ((0.5, 0.3, 0.2, 0.0), (0.0, 0.5, 0.3, 0.2), (0.2, 0.0, 0.5, 0.3), (0.3, 0.2, 0.0, 0.5))


def gradient(weights: np.ndarray, worker: int) -> np.ndarray:
    """Return the gradient that `Numbers` computes."""
    return 0.01 * weights + (worker + 1)


class Heard(VirtualRuntime):
    """A virtual runtime that logs sent and delivered values in their order."""

    log: ClassVar[list[tuple[str, int, int, int]]] = []

    def _send(self, source: int, to: int, message: Message) -> None:
        if message.values is not None:
            self.log.append(("sent", source, to, message.step))
        super()._send(source, to, message)

    def _deliver(self, to: int, message: Message) -> None:
        if message.values is not None:
            self.log.append(("there", message.source, to, message.step))
        super()._deliver(to, message)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    monkeypatch.setattr(Heard, "log", [])
    monkeypatch.setattr(sample_programs, "VirtualRuntime", Heard)
    return Heard.log


def paper(topology: Any, workers: int, step: int, log: list[Any]) -> np.ndarray:
    """Return a step's mixing matrix from the paper's formula, or for random pairs from the log."""
    if topology == "ring":
        every = np.eye(workers) + np.roll(np.eye(workers), 1, 0) + np.roll(np.eye(workers), -1, 0)
        return every / 3
    if topology == "exponential":  # 1, 2, 4, … ranks before, in turn
        away = [2**k for k in range(10) if 2**k < workers]
        return (np.eye(workers) + np.roll(np.eye(workers), away[step % len(away)], 0)) / 2
    if topology == "random_pairs":
        said = {(to, source) for kind, source, to, when in log if (kind, when) == ("sent", step)}
        assert said == {pair[::-1] for pair in said}  # both take half of each other's weights
        assert len({to for to, _ in said}) == len(said) == workers // 2 * 2
        return np.eye(workers) + sum(
            (np.outer(np.eye(workers)[to], np.eye(workers)[source] - np.eye(workers)[to]) / 2)
            for to, source in said
        )
    return np.array(topology)


@pytest.mark.parametrize(
    ("topology", "workers"),
    [
        *(("ring", 3), ("ring", 5), ("exponential", 3), ("exponential", 5)),
        *(("random_pairs", 3), ("random_pairs", 6), (DIRECTED, 3), (PUSHED, 4)),
    ],
)
def test_workers_mix_as_the_formula_says(topology: Any, workers: int, log: list[Any]) -> None:
    _, scenes, _ = play(Gossip(topology), workers, steps=20)
    own, shares = [np.zeros(4 * SIZE)] * workers, np.ones(workers)
    for step in range(20):
        mixing = paper(topology, workers, step, log)
        debiased = [each / share for each, share in zip(own, shares, strict=True)]
        own = [
            sum(mixing[to, source] * own[source] for source in range(workers))
            - 0.1 * gradient(debiased[to], to)
            for to in range(workers)
        ]
        shares = mixing @ shares
    for worker in range(workers):
        expected = own[worker] / shares[worker]
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        *(Gossip(each) for each in ("ring", "exponential", "random_pairs", DOUBLY, PUSHED)),
        *(Gossip(each, asynchronous=True) for each in ("ring", "random_pairs")),
    ],
    ids=lambda strategy: f"{str(strategy.topology)[:12]}-{strategy.asynchronous}",
)
def test_the_mean_of_weights_changes_by_gradients_alone(
    strategy: Gossip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test that only gradients change the mean, in which a push-sum worker counts by its share."""
    given: list[np.ndarray] = []

    def drawn(self: Numbers, worker: int, weights: np.ndarray) -> Gradient:
        step = self.steps[worker] = self.steps.get(worker, -1) + 1
        given.append(np.random.default_rng([worker, step]).normal(size=weights.size))
        return Gradient(given[-1], 2, 0.5, step)

    monkeypatch.setattr(Numbers, "gradient", drawn)
    _, scenes, _ = play(strategy, 4, steps=20)
    held = [scenes.held[holder] for holder in strategy.copies(4)]
    shares = np.ones(4)
    if strategy.topology == PUSHED:
        shares = np.linalg.matrix_power(np.array(PUSHED), 20) @ shares
    mean = np.mean([share * each for share, each in zip(shares, held, strict=True)], axis=0)
    assert np.std(held, axis=0).mean() > 0.01  # the workers' weights differ
    np.testing.assert_allclose(mean, -0.1 * np.sum(given, 0) / 4, rtol=0, atol=1e-12)


@given(st.sampled_from(["ring", "exponential", "random_pairs"]), st.integers(1, 17), st.data())
def test_every_step_keeps_the_mean(topology: Any, workers: int, data: st.DataObject) -> None:
    mixing = Gossip(topology).mixing(workers, data.draw(st.integers(0, 9)), 3)
    np.testing.assert_allclose(mixing.sum(0), 1.0)
    np.testing.assert_allclose(mixing.sum(1), 1.0)
    assert (mixing >= 0).all()
    assert (np.diag(mixing) > 0).all()


def test_on_the_complete_graph_it_is_averaging() -> None:
    """Test gradients linear in the weights, for which the mean equals averaging in each step."""
    fifth = ((1 / 5,) * 5,) * 5
    ours, theirs = (play(each, 5, steps=20)[1] for each in (Gossip(fifth), ParameterAveraging(1)))
    mean = np.mean([ours.held[worker] for worker in range(5)], axis=0)
    np.testing.assert_allclose(mean, theirs.held[0], rtol=0, atol=1e-12)


def test_on_the_complete_graph_all_have_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "gradient", constant)
    third = ((1 / 3,) * 3,) * 3
    _, scenes, _ = play(Gossip(third), 3, steps=2)
    # After the first step, worker k has the weights -(k + 1) / 10; the second step mixes these and
    # adds the same again.
    for worker in range(3):
        expected = -0.1 * (1 + 2 + 3) / 3 - 0.1 * (worker + 1)
        np.testing.assert_allclose(scenes.held[worker], expected, rtol=0, atol=1e-12)


def constant(self: Numbers, worker: int, weights: np.ndarray) -> Any:
    step = self.steps[worker] = self.steps.get(worker, -1) + 1
    return Gradient(np.full_like(weights, worker + 1.0), 2, 0.5, step)


PACES = (1.0, 1.37, 2.9)


def test_active_workers_go_to_the_passive_one() -> None:
    """Test 60 steps of three workers, one of them passive, in the order of their times."""
    slow = {worker: Slowdown(compute=pace) for worker, pace in enumerate(PACES)}
    strategy = Gossip("ring", asynchronous=True)
    _, scenes, _ = play(strategy, 3, network=None, steps=20, slow=slow)
    held = [np.zeros(4 * SIZE)] * 3
    granted, done = 3, 0
    # Each entry has the end of a step, its worker, the weights it computes at and the weights it
    # averages with.
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
    for number, worker in ((0, 0), (3, 1), (2, 2)):  # rank 3 holds passive worker 1's weights
        np.testing.assert_allclose(scenes.held[number], held[worker], rtol=0, atol=1e-11)


@pytest.mark.parametrize("topology", ["ring", "random_pairs"])
def test_pairs_take_their_mean_in_the_order_in_which_they_spoke(
    topology: Any, log: list[Any]
) -> None:
    """Test six workers by replaying their log; ranks 6, 7, 8 answer for the passive ones."""
    slow = {worker: Slowdown(compute=1 + 0.37 * worker) for worker in range(6)}
    _, scenes, _ = play(Gossip(topology, asynchronous=True), 6, steps=20, slow=slow)
    held = {who: np.zeros(4 * SIZE) for who in range(9)}
    begun = dict(held)  # the weights at which a worker computes
    flying: dict[tuple[int, int], list[np.ndarray]] = {}
    for kind, source, to, _ in log:
        line = flying.setdefault((source, to), [])
        if kind == "sent" and source < 6:
            begun[source] = held[source]
            line.append(gradient(held[source], source) if source % 2 else held[source])
        if kind == "sent":
            continue
        values = line.pop(0)
        if to >= 6:  # it answers with its weights, then averages
            stepped = held[to] - 0.1 * values if source % 2 else held[to]
            flying.setdefault((to, source), []).append(stepped)
            held[to] = stepped if source % 2 else (held[to] + values) / 2
        elif to % 2:
            held[to] = values
        else:
            held[to] = (held[to] + values) / 2 - 0.1 * gradient(begun[to], to)
    assert sum(scenes.steps.values()) == 6 * 20
    for who in (0, 2, 4, 6, 7, 8):
        np.testing.assert_allclose(scenes.held[who], held[who], rtol=0, atol=1e-12)
    partners = {to for kind, source, to, _ in log if kind == "sent" and source == 0}
    assert len(partners) == (2 if topology == "ring" else 3)


def test_one_slow_worker_holds_up_nobody() -> None:
    """Test that epochs are 4 times faster than by allreduce when one worker is 10 times slower."""
    slow = {7: Slowdown(compute=10.0)}
    together, _, _ = play(ParameterAveraging(1), 8, steps=20, slow=slow)
    for topology in ("ring", "random_pairs"):
        apart, _, _ = play(Gossip(topology, asynchronous=True), 8, steps=20, slow=slow)
        assert together.now > 4 * apart.now


def test_gaps_are_those_of_the_eigenvalues() -> None:
    """Test the ring of n: 1 - (1 + 2 cos(2π/n)) / 3; and the exponential graph: cos²(πkj/n)."""
    for workers in (4, 8, 16):
        expected = 1 - (1 + 2 * np.cos(2 * np.pi / workers)) / 3
        assert Gossip("ring").spectral_gap(workers) == pytest.approx(expected, abs=1e-9)
        away = 2 ** np.arange(np.log2(workers))[:, None]
        squares = np.cos(np.pi * away * np.arange(1, workers) / workers) ** 2
        expected = 1 - np.sqrt(squares.mean(axis=0).max())
        assert Gossip("exponential").spectral_gap(workers) == pytest.approx(expected, abs=1e-9)
    for workers in (5, 6):  # for random pairs, use the mean over many draws
        strategy = Gossip("random_pairs")
        drawn = [strategy.mixing(workers, step) for step in range(4_000)]
        mean = np.mean([each.T @ each for each in drawn], axis=0)
        expected = 1 - np.sqrt(np.linalg.eigvalsh(mean)[-2])
        assert strategy.spectral_gap(workers) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"topology": ((0.5, 0.2), (0.5, 0.5))}, "these columns sum to 1, 0.7"),
        ({"topology": ((0.5, 0.5), (0.5,))}, "must be a square matrix"),
        ({"topology": DIRECTED}, "topology has 3 rows, but workers=2"),
        ({"topology": "exponential", "asynchronous": True}, "has no such pairs"),
        ({"compressor": "Int8"}, "Gossip has no 'compressor'"),
    ],
)
def test_what_is_no_topology_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        Experiment(dataset="digits", workers=2, strategy=Gossip(**fields))


def test_a_record_of_an_earlier_run_is_understood() -> None:
    """Test records of earlier runs, in which all replica strategies had these two fields."""
    assert Gossip(compressor=None, algorithm="auto") == Gossip()
