"""Test replays of runs with parameter servers: identical, or with one change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import AllReduce, Cluster, Experiment, ParameterServer, Run
from labkit.cluster.serving import replay_experiment
from labkit.common.errors import InvalidInput

ASKED: dict[str, Any] = {
    "model": "mlp",
    "model_options": {"widths": [8]},
    "dataset": "digits",
    "dataset_options": {"rows": 200, "test_rows": 20},
    "batch_size": 40,
    "epochs": 2,
    "strategy": ParameterServer(1, synchronous=False),
    "workers": 3,
    "verify": False,
}
VIRTUAL: dict[str, Any] = {
    "clock": "virtual",
    "virtual": {"compute_time": {"seconds": 0.01, "distribution": "exponential"}},
    "network": "1GbE",
}


def weights(run: Run) -> list[np.ndarray]:
    return [np.asarray(weight) for weight in run.model().get_weights()]


def same(ours: Run, theirs: Run) -> bool:
    pairs = zip(weights(ours), weights(theirs), strict=True)
    return all(one.tobytes() == other.tobytes() for one, other in pairs)


@pytest.fixture(scope="module")
def played(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("played"))
        return cluster.run(Experiment(**ASKED, **VIRTUAL), show=False)


def test_a_virtual_run_has_the_record_of_any_run(played: Run) -> None:
    assert played.status["state"] == "completed"
    assert played.metrics["clock"] == "virtual"
    assert set(played.history["rank"]) == {0, 1, 2}
    assert len(played.history) == 2 * 5 * 3 == len(played.update_log)
    assert played.history["staleness"].mean() == pytest.approx(2, abs=1)
    # The parts of a batch have 13 or 14 samples, so the sum may deviate.
    assert played.history["samples"].sum() == pytest.approx(2 * 200, abs=3)
    assert [epoch["epoch"] for epoch in played.metrics["epochs"]] == [0, 1]
    assert played.metrics["exchange"]["compute_seconds"] == 0.01


def test_the_same_again_is_the_same_bit_for_bit(cluster: Cluster, played: Run) -> None:
    once_more = cluster.run(Experiment(**ASKED, **VIRTUAL), show=False)
    assert same(once_more, played)
    assert once_more.update_log.equals(played.update_log)


def test_one_thing_changed_changes_only_that(cluster: Cluster, played: Run) -> None:
    changed = cluster.run(replay_experiment(played, stragglers={1: 4.0}), show=False)
    assert not same(changed, played)
    ours, theirs = (
        run.history[run.history["rank"] == 0]["compute_seconds"].head(5).to_list()
        for run in (changed, played)
    )
    assert ours == pytest.approx(theirs, abs=1e-9)


def test_what_ranks_did_comes_out_the_same_on_the_virtual_clock(cluster: Cluster) -> None:
    measured = cluster.run(Experiment(**ASKED), show=False)
    assert measured.metrics["clock"] == "wall"
    assert len(measured.update_log) == 30
    replayed = cluster.run(replay_experiment(measured), show=False)
    assert replayed.metrics["clock"] == "virtual"
    assert same(replayed, measured)
    # An exact replay forces the recorded order of updates; with a change, simulated times decide
    # it.
    assert (
        len(replay_experiment(replayed).virtual.update_order),
        replay_experiment(replayed, stragglers={1: 2.0}).virtual.update_order,
    ) == (30, ())


def test_what_cannot_be_played_again_says_why(cluster: Cluster) -> None:
    plain = Experiment(**ASKED | {"strategy": AllReduce("ring"), "workers": 1, "epochs": 1})
    with pytest.raises(InvalidInput, match="has no update log"):
        replay_experiment(cluster.run(plain, show=False))


def test_a_worker_is_slow_without_an_emulated_network(cluster: Cluster) -> None:
    fields = ASKED | {"epochs": 4, "stragglers": {1: {"compute": 12.0}}}
    run = cluster.run(Experiment(**fields), show=False)
    # The slow worker computes fewer steps of the common total.
    steps = run.history.groupby("rank").size()
    assert steps[1] < min(steps[0], steps[2])
    assert steps.sum() == 4 * 5 * 3
