"""Test stale gradients: bounds, averages and corrections, also without staleness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import SIZE, play

from labkit import Experiment, Network, ParameterServer, Slowdown, SoftSync, StaleSynchronous
from labkit.common.errors import InvalidInput
from labkit.network import ComputeTime
from labkit.programs import EventLog

LAWS = ("constant", "exponential", "lognormal")


def ahead(diary: EventLog, workers: int) -> int:
    """Return the most clocks that a worker was ahead of the slowest when it began a gradient."""
    done: dict[tuple[int, int], float] = {}
    for event in diary.events:
        done[int(event["worker"]), int(event["step"])] = event["delivered"]
    most = 0
    for event in diary.events:
        step, worker = int(event["step"]), int(event["worker"])
        if not step:
            continue
        # The server answered after it had the worker's previous gradient. When the worker sent this
        # gradient, all gradients that the answer waited for had arrived.
        others = [
            sum(done.get((other, k), np.inf) < event["sent"] for k in range(step + 1))
            for other in range(workers)
            if other != worker
        ]
        most = max(most, step - min(others))
    return most


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_nobody_is_further_ahead_than_the_bound(staleness: int) -> None:
    """Test a thousand random laws: machines differ, and compute times are drawn."""
    reached = 0
    for seed in range(334):
        rng = np.random.default_rng(seed)
        workers = int(rng.integers(2, 5))
        slow = {int(rng.integers(workers)): Slowdown(compute=float(rng.uniform(1, 8)))}
        law = ComputeTime(0.1, distribution=LAWS[seed % 3])
        given: Any = {"network": None, "steps": 8, "compute": law, "slow": slow}
        _, _, diary = play(StaleSynchronous(staleness), workers, seed=seed, **given)
        assert len(diary.events) == 8 * workers
        furthest = ahead(diary, workers)
        assert furthest <= staleness, (seed, workers)
        reached = max(reached, furthest)
        most = max(int(event["staleness"]) for event in diary.events)
        assert most <= (workers - 1) * (2 * staleness + 1)
    assert reached == staleness


def test_without_a_bound_somebody_is() -> None:
    given: Any = {"network": None, "slow": {0: Slowdown(compute=6.0)}}
    _, _, diary = play(ParameterServer(1, synchronous=False), 3, **given)
    assert ahead(diary, 3) > 5


def test_who_is_bound_by_zero_does_what_synchronous_servers_do() -> None:
    given: Any = {"slow": {1: Slowdown(compute=3.0)}}
    stale = play(StaleSynchronous(0, servers=2), 3, **given)
    plain = play(ParameterServer(2), 3, **given)
    assert stale[2].events == plain[2].events
    assert all(stale[1].held[s].tobytes() == plain[1].held[s].tobytes() for s in (3, 4))


@pytest.mark.parametrize(
    ("splits", "steps"),
    [
        *((n, 60) for n in (1, 2, 15)),
        *(pytest.param(n, 400, marks=pytest.mark.slow) for n in (1, 15, 30)),
    ],
)
def test_thirty_workers_are_as_late_as_there_are_splits(splits: int, steps: int) -> None:
    """Test Zhang 2016: staleness is n on average, and above 2 n with a probability below 1e-4."""
    law = ComputeTime(0.1, distribution="lognormal", sigma=0.1)
    _, _, diary = play(SoftSync(splits), 30, network=None, steps=steps, compute=law)
    late = np.array([event["staleness"] for event in diary.events][300:])
    assert late.mean() == pytest.approx(splits, rel=0.02)
    assert (late > 2 * splits).mean() < 1e-4  # out of 1,500 or 11,700 gradients


def test_one_softsync_of_equal_workers_is_synchronous_training_one_update_late() -> None:
    workers, steps = 4, 9
    _, scenes, diary = play(SoftSync(1), workers, network=None, steps=steps)
    weights = [np.zeros(4 * SIZE)] * 2
    for _ in range(steps):
        # Take the mean of 0.01 w + k + 1 over workers, at the weights before the last update.
        mean = 0.01 * weights[-2] + np.mean([k + 1 for k in range(workers)])
        weights.append(weights[-1] - 0.1 * mean)
    assert abs(scenes.held[workers] - weights[-1]).max() < 1e-12
    assert {event["staleness"] for event in diary.events[workers:]} == {1}


def test_what_is_left_over_is_written_down_as_dropped() -> None:
    _, _, diary = play(SoftSync(1), 3, network=None, steps=5, slow={0: Slowdown(compute=9.0)})
    left = [event for event in diary.events if event["update"] < 0]
    assert len(diary.events) == 15
    assert len(left) == 15 % 3


def followed(strategy: Any, diary: EventLog, workers: int, rate: Any) -> np.ndarray:
    """Return the weights after one server's updates, by a formula for each gradient."""
    versions = [np.zeros(4 * SIZE)]
    updates: dict[int, list[dict[str, float]]] = {}
    for event in diary.events:
        updates.setdefault(int(event["update"]), []).append(event)
    for number in sorted(update for update in updates if update >= 0):
        now, step = versions[-1], np.zeros(4 * SIZE)
        for event in updates[number]:
            then = versions[int(event["version"])]
            gradient = 0.01 * then + (event["worker"] + 1)
            step += rate(gradient, now - then, number - event["version"]) / len(updates[number])
        versions.append(now - 0.1 * step)
    return versions[-1]


REMEDIES = {
    "per_gradient": lambda g, moved, late: g / max(1, late),
    "mean": lambda g, moved, late: g / 2,
    "delay_compensated": lambda g, moved, late: g + 0.04 * g * g * moved,
}


@pytest.mark.parametrize("remedy", sorted(REMEDIES))
def test_a_remedy_is_its_formula(remedy: Any) -> None:
    strategy, workers = SoftSync(2, staleness_correction=remedy), 5  # 5 // 2 gradients per update
    formula = REMEDIES[remedy]
    if remedy == "mean":

        def formula(g: Any, moved: Any, late: Any) -> Any:
            return g / (5 / 2)

    law = ComputeTime(0.1, distribution="exponential")
    _, scenes, diary = play(strategy, workers, network=None, compute=law)
    assert len({event["staleness"] for event in diary.events}) > 2
    found = followed(strategy, diary, workers, formula)
    assert abs(scenes.held[workers] - found).max() < 1e-9
    unmended = followed(strategy, diary, workers, lambda g, moved, late: g)
    assert abs(scenes.held[workers] - unmended).max() > 1e-3


def test_momentum_gives_way_to_staleness() -> None:
    fields: Any = {
        "dataset": "digits",
        "workers": 4,
        "clock": "virtual",
        "optimizer_options": {"momentum": 0.9},
    }
    asked = Experiment(strategy=SoftSync(4, staleness_correction="momentum"), **fields)
    # A momentum of 0.9 gives a mean age of 9 gradients, of which staleness causes 4.
    assert asked.strategy.optimizer_options_of(asked)["momentum"] == pytest.approx(5 / 6)
    assert asked.strategy.rate_of(asked) == pytest.approx((1 / 6) / 0.1)
    many = asked.replace(workers=30, strategy=SoftSync(30, staleness_correction="momentum"))
    assert many.strategy.optimizer_options_of(many)["momentum"] == 0
    assert many.strategy.rate_of(many) == pytest.approx(10)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (SoftSync(3), "n=3 exceeds the number of gradients of workers=2; allowed: 1 to 2"),
        (StaleSynchronous(0, staleness_correction="mean"), "because no gradient is stale"),
        (SoftSync(2, staleness_correction="momentum"), "use optimizer='sgd' with"),
        (
            StaleSynchronous(1, servers=3, colocated=True),
            "exceeds workers=2, whose ranks run the servers",
        ),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(strategy: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Experiment(dataset="digits", workers=2, clock="virtual", strategy=strategy)


def test_a_straggler_costs_less_the_further_others_may_run_ahead() -> None:
    """Test Ho 2013: the time for as many gradients lies between synchronous and asynchronous."""
    network = Network(latency=1e-4, bandwidth=1e9)
    law = ComputeTime(0.1, distribution="exponential")
    times = [
        play(strategy, 6, network=network, compute=law, steps=40)[0].now
        for strategy in (
            ParameterServer(1),
            StaleSynchronous(2),
            StaleSynchronous(8),
            ParameterServer(1, synchronous=False),
        )
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[-1]
