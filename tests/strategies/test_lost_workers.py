"""Test the loss of a worker: asynchronous strategies continue, and others are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import play
from test_stale import ahead

from labkit import (
    AllReduce,
    Cluster,
    Downpour,
    Experiment,
    Network,
    ParameterServer,
    SoftSync,
    StaleSynchronous,
)
from labkit.common.errors import InvalidInput
from labkit.network import ComputeTime

LAW = ComputeTime(0.1, distribution="lognormal")
ON: list[Any] = [
    ParameterServer(2, synchronous=False),
    SoftSync(2, servers=2),
    SoftSync(4),
    Downpour(servers=2),
    Downpour(servers=2, stages=3),
]


@pytest.mark.parametrize("strategy", ON, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("moment", [0.0, 0.55, 1.6])
def test_others_compute_what_it_had_still_to_do(strategy: Any, moment: float) -> None:
    _, scenes, diary = play(strategy, 4, steps=10, epochs=2, compute=LAW, lost={1: moment})
    own = [event for event in diary.events if event["server"] == 4]
    assert len(own) == 2 * 10 * 4
    late = [event for event in own if event["worker"] == 1 and event["sent"] > moment]
    assert not late
    assert max(event["sent"] for event in own) > moment
    servers = len({event["server"] for event in diary.events})
    assert sorted(scenes.epochs) == [(e, 4 + s) for e in (0, 1) for s in range(servers)]
    (loss,) = diary.losses
    assert (loss["worker"], loss["seconds"]) == (1, moment)
    assert loss["gradients"] == sum(row["rank"] == 1 for row in scenes.rows)


def test_replicas_that_fetch_seldom_go_on_too() -> None:
    strategy = Downpour(fetch_every=4, push_every=2)
    _, scenes, diary = play(strategy, 3, steps=10, epochs=2, compute=LAW, lost={0: 0.65})
    # Pushes of the lost worker since its last fetch are kept, and other workers compute all its
    # remaining rows.
    rows = sum(event["rows"] for event in diary.events)
    assert 2 * 60 <= rows < 2 * (60 + 3 * 4 + 4)
    assert [epoch for epoch, _ in scenes.epochs] == [0, 1]


def test_stale_synchronous_workers_do_not_wait_for_the_dead() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        given: Any = {"steps": 12, "compute": LAW, "seed": seed, "network": None}
        _, scenes, diary = play(StaleSynchronous(2), 4, lost={3: rng.uniform(0, 0.8)}, **given)
        counts = np.bincount([int(event["worker"]) for event in diary.events], minlength=4)
        assert counts[:3].tolist() == [12, 12, 12]  # each worker's own steps
        assert counts[3] < 12 - 2
        living = [event for event in diary.events if event["worker"] < 3]
        diary.events = living
        assert ahead(diary, 3) <= 2
        assert [epoch for epoch, _ in scenes.epochs] == [0]


def test_who_waits_for_all_but_one_goes_on_without_that_one() -> None:
    network = Network(latency=1e-4, bandwidth=1e9)
    world, scenes, diary = play(
        ParameterServer(1, backup_workers=1), 3, network=network, lost={2: 0.25}
    )
    assert scenes.held[3][0] != 0
    applied = [event for event in diary.events if event["update"] >= 0]
    assert len(applied) == 2 * 10
    assert world.now == pytest.approx(1.0, abs=0.05)


def test_who_is_lost_behind_the_end_changes_nothing() -> None:
    strategy = ParameterServer(1, synchronous=False)
    one, other = (play(strategy, 3, lost=lost)[2] for lost in ({}, {1: 99.0}))
    assert one.events == other.events
    assert other.losses == []


def test_an_epoch_ends_although_nobody_is_left_to_compute_its_last_gradient() -> None:
    given: Any = {
        "network": None,
        "compute": ComputeTime(trace=[(0.1,) * 10, (0.1,) * 10, (0.3,)]),
    }
    strategy = ParameterServer(1, synchronous=False)
    # At 0.7 s, the other workers know that no steps remain, while the last worker still computes.
    _, scenes, diary = play(strategy, 3, steps=5, lost={2: 0.7}, **given)
    assert len(diary.events) == 14
    assert [epoch for epoch, _ in scenes.epochs] == [0]


def test_the_record_says_who_was_lost_and_when(cluster: Cluster) -> None:
    found = cluster.run(
        Experiment(
            dataset="digits",
            dataset_options={"rows": 96, "test_rows": 10},
            model_options={"widths": [8]},
            batch_size=24,
            workers=3,
            clock="virtual",
            virtual={"compute_time": 0.1, "worker_failures": {1: 0.25, 2: 0.0}},
            strategy=ParameterServer(synchronous=False),
        ),
        show=False,
    )
    assert found.metrics["equivalence"]["verdict"] == "passed"
    told = {loss["worker"]: loss for loss in found.metrics["exchange"]["lost"]}
    assert told[1] == {"worker": 1, "seconds": 0.25, "gradients": 2}
    assert told[2] == {"worker": 2, "seconds": 0.0, "gradients": 0}
    assert len(found.history) == 12
    assert set(found.history["rank"]) == {0, 1}


VIRTUAL: dict[str, Any] = {"virtual": {"worker_failures": {1: 2.0}}, "workers": 2}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"strategy": ParameterServer()}, r"ParameterServer with workers=2 tolerates 0 failures"),
        ({"strategy": AllReduce("ring")}, "AllReduce with workers=2 tolerates 0 failures"),
        ({"strategy": StaleSynchronous(0)}, "and with more it would wait forever"),
        (
            {"strategy": SoftSync(1), "virtual": {"worker_failures": {0: 1.0, 1: 2.0}}},
            "SoftSync with workers=2 tolerates",
        ),
        (
            {"strategy": SoftSync(1), "virtual": {"worker_failures": {2: 1.0}}},
            r"worker_failures=\[2\] names workers outside workers=2; give worker numbers from 0 to",
        ),
        (
            {"strategy": SoftSync(1), "virtual": {"worker_failures": [(1, -1.0)]}},
            "greater than or equal to 0",
        ),
        ({"strategy": SoftSync(1), "clock": "wall"}, "clock='wall' measures times"),
        (
            {"strategy": SoftSync(1, servers=2, colocated=True)},
            r"worker_failures=\[1\] share ranks with servers=2, so the servers' weights would also",
        ),
    ],
    ids=str,
)
def test_what_would_wait_for_ever_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Experiment(dataset="digits", **VIRTUAL | fields)
