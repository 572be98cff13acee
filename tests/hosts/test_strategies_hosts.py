"""Every strategy on two ranks of each of two hosts learns what its gate says it must."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import labkit as lk
from labkit.hosts import Testbed
from labkit.strategies import STRATEGIES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_folder")]

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 80, "test_rows": 10},
    "model_options": {"widths": [8, 8, 8]},
    "batch_size": 40,
    "workers": 4,
}
# Against one process, or servers written anew; Downpour divides by the roots of small sums.
EXACT: dict[str, tuple[Any, float]] = {
    "AllReduce": (lk.AllReduce(algorithm="ring"), 1e-12),
    "Pipeline": (lk.Pipeline(), 1e-12),
    "Layerwise": (lk.Layerwise(), 1e-12),
    "TensorParallel": (lk.TensorParallel(), 1e-12),
    "LocallyConnected": (lk.LocallyConnected((2, 2)), 1e-12),
    "ParameterServer": (lk.ParameterServer(), 1e-12),
    "StaleSynchronous": (lk.StaleSynchronous(), 1e-12),
    "SoftSync": (lk.SoftSync(), 1e-12),
    "Downpour": (lk.Downpour(), 1e-9),
    "compressed": (lk.AllReduce(compressor=lk.TopK(ratio=0.1)), 1e-11),
}
# Their copies take steps that nobody can play again.
LOCAL = [
    "DelayedGradients",
    "ParameterAveraging",
    "AsynchronousDiLoCo",
    "ElasticAveraging",
    "Gossip",
    "Codistillation",
    "ScheduledBlocks",
]
REFUSED = ["TFDistribute", "Peer"]  # their processes have one host


@pytest.fixture(scope="module")
def ranks(bed: Testbed) -> Iterator[lk.Cluster]:
    """Two on each host, for four workers, and two for servers beside them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        with lk.Cluster(hosts=["a:2", "b:3"]) as cluster:
            assert cluster.state()["hosts"] == ["a", "a", "b", "b", "b"]
            yield cluster


def question(name: str, strategy: Any) -> lk.Experiment:
    fields = SMALL | {"strategy": strategy}
    if name == "LocallyConnected":
        del fields["model_options"]
        fields["model"] = "locally_connected"
    if name == "ScheduledBlocks":
        del fields["model_options"]
    return lk.Experiment(**fields)


def test_no_strategy_is_left_out() -> None:
    assert {*EXACT, *LOCAL, *REFUSED} - {"compressed"} == set(STRATEGIES)


@pytest.mark.parametrize("name", EXACT)
def test_what_has_an_equal_is_equal_to_it(ranks: lk.Cluster, name: str) -> None:
    strategy, most = EXACT[name]
    verdict = ranks.run(question(name, strategy), show=False).metrics["equivalence"]
    assert verdict["verdict"] == "passed", verdict["reason"]
    assert verdict["max_abs_difference"] <= most


@pytest.mark.parametrize("name", LOCAL)
def test_what_has_none_trains_to_its_end(ranks: lk.Cluster, name: str) -> None:
    run = ranks.run(question(name, STRATEGIES[name]()), show=False)
    assert run.status["state"] == "completed"
    assert run.metrics["equivalence"]["verdict"] == "not applicable"
    assert set(run.history["rank"]) == {0, 1, 2, 3}


def test_tensorflows_own_strategies_are_refused_with_a_sentence(ranks: lk.Cluster) -> None:
    with pytest.raises(lk.InvalidInput, match="one host"):
        ranks.run(question("TFDistribute", lk.TFDistribute()), show=False)
