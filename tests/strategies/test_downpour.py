"""Test Downpour against a NumPy version of its algorithm and an asynchronous server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sample_programs import SIZE, Numbers, play

from labkit import Cluster, Downpour, Experiment, ParameterServer, Slowdown
from labkit.common.errors import InvalidInput
from labkit.network import ComputeTime


def test_with_both_at_one_it_is_an_asynchronous_server() -> None:
    given: Any = {"compute": ComputeTime(0.1, distribution="exponential")}
    ours = play(Downpour(servers=2), 3, **given)
    plain = play(ParameterServer(2, synchronous=False), 3, **given)
    assert ours[2].events == plain[2].events
    assert all(ours[1].held[s].tobytes() == plain[1].held[s].tobytes() for s in (3, 4))


@pytest.mark.parametrize(("fetch", "push"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 3)])
def test_one_replica_is_the_algorithm(fetch: int, push: int) -> None:
    strategy = Downpour(fetch_every=fetch, push_every=push, local_rate=0.02, servers=2)
    _, scenes, _ = play(strategy, 1, steps=12, network=None)
    central = own = np.zeros(4 * SIZE)
    accrued = np.zeros(4 * SIZE)
    for number in range(1, 13):
        gradient = 0.01 * own + 1
        accrued, own = accrued + gradient, own - 0.02 * gradient
        if number % push == 0:
            central, accrued = central - 0.1 * accrued, np.zeros(4 * SIZE)
        if number % fetch == 0:
            own = central
    central = central - 0.1 * accrued  # a worker pushes the rest when it leaves
    for server, half in ((1, slice(0, None)), (2, slice(0, None))):
        assert scenes.held[server] == pytest.approx(central[half][: 2 * SIZE], abs=1e-12)


def test_one_replica_that_pushes_and_fetches_each_batch_is_plain_training(cluster: Cluster) -> None:
    fields: dict[str, Any] = {
        "dataset": "digits",
        "dataset_options": {"rows": 100, "test_rows": 10},
        "model_options": {"widths": [8]},
        "batch_size": 30,
        "epochs": 2,
        "optimizer": "adagrad",
        "precision": "float64",
        "verify": False,
    }
    plain = cluster.run(Experiment(**fields), show=False)
    ours = cluster.run(Experiment(strategy=Downpour(), clock="virtual", **fields), show=False)
    pairs = zip(plain.model().get_weights(), ours.model().get_weights(), strict=True)
    assert max(abs(one - other).max() for one, other in pairs) < 1e-12


def test_a_push_without_rows_is_written_down_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "batch", lambda own, worker: 2 * (worker > 0))
    _, _, diary = play(Downpour(), 3)
    dropped = [event for event in diary.events if event["update"] < 0]
    assert len(diary.events) == 30
    assert {event["worker"] for event in dropped} == {0}
    assert len(dropped) == 10


def test_replicas_end_when_the_epochs_are_over_and_every_gradient_is_pushed() -> None:
    slow = {0: Slowdown(compute=5.0)}
    strategy = Downpour(fetch_every=4, push_every=3)
    _, scenes, diary = play(strategy, 3, steps=10, epochs=2, slow=slow)
    batches = len(scenes.rows)
    assert 60 <= batches < 60 + 3 * 4
    assert sum(event["rows"] for event in diary.events) == 2 * batches
    assert [epoch for epoch, _ in scenes.epochs] == [0, 1]
    assert scenes.steps[0] < scenes.steps[1]


def test_fewer_pushes_are_fewer_bytes() -> None:
    often, seldom = (
        sum(row["payload_bytes"] for row in play(strategy, 3, steps=12)[1].rows)
        for strategy in (Downpour(), Downpour(fetch_every=4, push_every=4))
    )
    assert seldom == pytest.approx(often / 4)


def test_replicas_that_never_meet_are_refused() -> None:
    with pytest.raises(InvalidInput, match="a replica would train alone; allowed: 1 to 10000"):
        Experiment(dataset="digits", workers=2, strategy=Downpour(push_every=20_000))
