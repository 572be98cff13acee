"""Test training on two ranks of each of two hosts: every strategy, and the loss of a host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lk
from labkit.cluster.calls import RankError
from labkit.cluster.run_handle import RunHandle
from labkit.hosts import Testbed
from labkit.records import store
from labkit.strategies import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_folder")]

ROOT = Path(__file__).parents[2]
HANG = 100.0  # seconds after which an immediate action counts as missing
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 80, "test_rows": 10},
    "model_options": {"widths": [8, 8, 8]},
    "batch_size": 40,
    "workers": 4,
}
# Tolerances against one process or reference servers; Downpour needs more, because it divides by
# roots of small sums.
EXACT: dict[str, tuple[Any, float]] = {
    "AllReduce": (lk.AllReduce(algorithm="ring"), 1e-12),
    "Pipeline": (lk.Pipeline(), 1e-12),
    "Layerwise": (lk.Layerwise(), 1e-12),
    "TensorParallel": (lk.TensorParallel(), 1e-12),
    "SpatialParallel": (lk.SpatialParallel((2, 2)), 1e-12),
    "ParameterServer": (lk.ParameterServer(), 1e-12),
    "StaleSynchronous": (lk.StaleSynchronous(), 1e-12),
    "SoftSync": (lk.SoftSync(), 1e-12),
    "Downpour": (lk.Downpour(), 1e-9),
    "compressed": (lk.AllReduce(compressor=lk.TopK(ratio=0.1)), 1e-11),
}
# With these strategies, the workers' model copies take steps that no reference can repeat.
LOCAL = [
    "DelayedGradients",
    "ParameterAveraging",
    "AsynchronousDiLoCo",
    "ElasticAveraging",
    "Gossip",
    "Codistillation",
    "BlockCoordinateDescent",
]
REFUSED = ["TFDistribute", "ExternalFramework"]  # all their processes must be on one host


@pytest.fixture(scope="module")
def ranks(bed: Testbed) -> Iterator[lk.Cluster]:
    """Yield two ranks on each host, with TensorFlow imported once; the last test kills them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with lk.Cluster(hosts=["a:2", "b:2"]) as cluster:
            assert cluster.state()["hosts"] == ["a", "a", "b", "b"]
            yield cluster


def question(name: str, strategy: Any) -> lk.Experiment:
    fields = SMALL | {"strategy": strategy}
    if name == "SpatialParallel":
        del fields["model_options"]
        fields["model"] = "locally_connected"
    if name == "BlockCoordinateDescent":
        del fields["model_options"]
    whole = lk.Experiment(**fields)
    servers = whole.ranks - whole.workers  # servers are among the ranks
    return whole.replace(workers=whole.workers - servers) if servers else whole


def training(workers: int) -> lk.Experiment:
    """Return an experiment that does not end by itself."""
    strategy = lk.AllReduce(algorithm="ring")
    fields = SMALL | {"model_options": {"widths": [8]}, "workers": workers, "epochs": 10_000}
    return lk.Experiment(**fields, strategy=strategy)


def wait_for(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + HANG
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def ended(live: RunHandle) -> tuple[float, str]:
    """Return the seconds until a doomed training has failed, and the cause in its record."""
    begin = time.monotonic()
    with pytest.raises(RankError):
        live.result()
    seconds = time.monotonic() - begin
    status = store.read_status(live.directory)
    assert status["state"] == "failed"
    return seconds, str(status["cause"])


def test_no_strategy_is_left_out() -> None:
    assert {*EXACT, *LOCAL, *REFUSED} - {"compressed"} == set(STRATEGIES)


@pytest.mark.battery(0, 4)
@pytest.mark.parametrize("name", EXACT)
def test_what_has_an_equal_is_equal_to_it(ranks: lk.Cluster, name: str) -> None:
    strategy, most = EXACT[name]
    verdict = ranks.run(question(name, strategy), show=False).metrics["equivalence"]
    assert verdict["verdict"] == "passed", verdict["reason"]
    assert verdict["max_abs_difference"] <= most


@pytest.mark.battery(0, 3)
@pytest.mark.parametrize("name", LOCAL)
def test_what_has_none_trains_to_its_end(ranks: lk.Cluster, name: str) -> None:
    experiment = question(name, STRATEGIES[name]())
    run = ranks.run(experiment, show=False)
    assert run.status["state"] == "completed"
    assert run.metrics["equivalence"]["verdict"] == "not applicable"
    assert set(run.history["rank"]) == set(range(experiment.workers))


def test_tensorflows_own_strategies_are_refused_with_a_sentence(ranks: lk.Cluster) -> None:
    with pytest.raises(lk.InvalidInput, match="one host"):
        ranks.run(question("TFDistribute", lk.TFDistribute()), show=False)


def test_a_link_that_comes_back_is_survived_and_one_that_does_not_is_named(
    bed: Testbed, ranks: lk.Cluster
) -> None:
    live = ranks.submit(training(workers=4))
    wait_for(lambda: live.epochs)
    try:
        bed.link_down("b")
        time.sleep(5)
        bed.link_up("b")
        before = len(live.epochs)
        wait_for(lambda: len(live.epochs) > before + 2)
        bed.link_down("b")
        seconds, cause = ended(live)
    finally:
        bed.link_up("b")
    assert "host b with rank 2, 3 has sent no status for" in cause
    assert seconds < HANG


def test_the_processes_of_a_host_are_killed(bed: Testbed) -> None:
    with lk.Cluster(hosts=["a:1", "b:1"]) as cluster:
        live = cluster.submit(training(workers=2))
        wait_for(lambda: live.epochs)
        bed.run("b", ["pkill", "-KILL", "-f", "labkit.cluster.engine|prted"])
        seconds, cause = ended(live)
    # mpiexec may first notice the end of a rank or of its own daemon.
    assert "host b is lost" in cause or "rank 1" in cause
    assert seconds < HANG
