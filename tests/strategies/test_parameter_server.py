"""Parameter servers against one process and against servers written anew, on both clocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from labkit import (
    QSGD,
    AllReduce,
    Cluster,
    ComputeTime,
    ErrorFeedback,
    Experiment,
    ParameterServer,
    PowerSGD,
    TopK,
)
from labkit.common.errors import InvalidInput

SMALL: dict[str, Any] = {
    "dataset": "digits",
    "dataset_options": {"rows": 100, "test_rows": 10},
    "model_options": {"widths": [8]},
    "batch_size": 30,
}
MOMENTUM = {"optimizer_options": {"momentum": 0.9}}
VIRTUAL = {"clock": "virtual", "compute": 0.01, "network": "1GbE"}


def verify(communicator: Any, experiments: list[Experiment], cache: str) -> list[dict[str, Any]]:
    from labkit.worker import gate
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return [dict(gate.verify(e, communicator, read(e, communicator))) for e in experiments]


def verdicts(cluster: Cluster, experiments: list[Experiment]) -> list[dict[str, Any]]:
    """Of experiments that want as many ranks."""
    cache = str(Path.cwd() / "cache")
    told = cluster.call(verify, experiments, cache, ranks=experiments[0].ranks)
    assert all(each == told[0] for each in told)
    return told[0]


def experiment(strategy: Any, workers: int, **fields: Any) -> Experiment:
    return Experiment(**SMALL | {"strategy": strategy, "workers": workers} | fields)


EXACT = [
    experiment(ParameterServer(1), 3, **VIRTUAL),
    experiment(ParameterServer(3, placement="sharded"), 2, optimizer="adam", **VIRTUAL),
    experiment(ParameterServer(2, placement="greedy"), 3, **MOMENTUM, **VIRTUAL),
    experiment(ParameterServer(2, colocated=True), 3, capacities=(1, 2, 1), **VIRTUAL),
    experiment(AllReduce("ring"), 3, optimizer="adam", **VIRTUAL),
]
REPLAYED = [
    experiment(ParameterServer(2, synchronous=False), 3, **MOMENTUM, **VIRTUAL),
    experiment(ParameterServer(1, synchronous=False), 1, optimizer="adam", **VIRTUAL),
    experiment(ParameterServer(1, backups=1), 3, slow={2: 3.0}, **VIRTUAL),
]


def test_on_the_virtual_clock_they_do_what_one_process_does(cluster: Cluster) -> None:
    for each, found in zip(EXACT, verdicts(cluster, EXACT), strict=True):
        assert found["verdict"] == "passed", (each, found)
        assert found["max_abs_difference"] < 1e-12, each


@pytest.mark.parametrize(
    "wanted",
    [
        experiment(ParameterServer(2, placement="sharded"), 2, **MOMENTUM),
        experiment(ParameterServer(2, colocated=True), 3, optimizer="adam"),
    ],
    ids=["apart", "colocated"],
)
def test_on_ranks_they_do_what_one_process_does(cluster: Cluster, wanted: Experiment) -> None:
    (found,) = verdicts(cluster, [wanted])
    assert found["verdict"] == "passed", found
    assert found["max_abs_difference"] < 1e-12


def test_what_is_not_exact_is_replayed_by_servers_written_anew(cluster: Cluster) -> None:
    for each, found in zip(REPLAYED, verdicts(cluster, REPLAYED), strict=True):
        assert found["verdict"] == "passed", (each, found)
        assert "replayed" in found["reason"]


def test_so_is_what_ranks_did(cluster: Cluster) -> None:
    strategy = ParameterServer(2, synchronous=False, colocated=True)
    (found,) = verdicts(cluster, [experiment(strategy, 2, optimizer="adagrad")])
    assert found["verdict"] == "passed", found


def trained(communicator: Any, experiments: list[Experiment]) -> list[list[Any]]:
    """The weights of each, on whichever clock."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    found = []
    for each in experiments:
        session = TrainingSession(each, communicator, read(each, communicator))
        session.feed.validation = None
        each.strategy.train(session)
        found.append([weight.numpy() for weight in session.model.weights])
        session.close()
    return found


def test_a_compressed_allreduce_is_the_same_on_both_clocks(cluster: Cluster) -> None:
    compressors = [TopK(ratio=0.2, threshold="exact"), ErrorFeedback(QSGD(levels=127)), PowerSGD()]
    wall = [
        experiment(AllReduce("ring", compressor=each), 2, precision="float64", epochs=2)
        for each in compressors
    ]
    virtual = [each.replace(clock="virtual", compute=0.01, network="1GbE") for each in wall]
    ours = cluster.call(trained, wall, ranks=2)[0]
    theirs = cluster.call(trained, virtual, ranks=1)[0]
    for compressor, one, other in zip(compressors, ours, theirs, strict=True):
        apart = max(abs(a - b).max() for a, b in zip(one, other, strict=True))
        assert apart < 1e-12, compressor


def swapped(communicator: Any, wanted: Experiment, cache: str) -> dict[str, Any]:
    """The verdict where worker 1 computes at the weights that worker 0 had last."""
    from labkit.programs.replica import Replica
    from labkit.worker import gate
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    plain, last = Replica.gradient, {}

    def gradient(own: Any, worker: int, weights: Any) -> Any:
        last[worker] = weights
        return plain(own, worker, last.get(1 - worker, weights) if worker < 2 else weights)

    Replica.gradient = gradient  # type: ignore[method-assign]
    try:
        return dict(gate.verify(wanted, communicator, read(wanted, communicator)))
    finally:
        Replica.gradient = plain  # type: ignore[method-assign]


def test_weights_that_were_swapped_on_their_way_are_found_out(cluster: Cluster) -> None:
    wanted = experiment(ParameterServer(1, synchronous=False), 3, **VIRTUAL)
    cache = str(Path.cwd() / "cache")
    (found,) = cluster.call(swapped, wanted, cache, ranks=1)
    assert found["verdict"] == "failed"
    assert "furthest apart" in found["reason"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"strategy": ParameterServer(1, backups=2)}, "leave nobody to wait for; allowed: 0 to 1"),
        ({"strategy": ParameterServer(3, colocated=True)}, "stand on the ranks of workers=2"),
        ({"strategy": ParameterServer(1, synchronous=False, backups=1)}, "nothing waits"),
        (
            {
                "strategy": ParameterServer(2, placement="sharded"),
                "optimizer_options": {"clipnorm": 1.0},
            },
            "needs the norm of whole gradients, but a server has",
        ),
        (
            {"strategy": ParameterServer(2), "optimizer_options": {"global_clipnorm": 1.0}},
            "needs the norm of all gradients",
        ),
        ({"precision": "mixed_float16"}, "use precision='mixed_bfloat16'"),
        ({"feed": "scatter"}, "use feed='shard'"),
        ({"compute": 0.1}, "use clock='virtual'"),
        ({"slow": {2: 2.0}}, "give 0 to workers - 1"),
        ({"clock": "virtual", "strategy": "Pipeline"}, "allowed: AllReduce, ParameterServer"),
        ({"clock": "virtual", "strategy": AllReduce("mpi")}, "no schedule whose time"),
        ({"callbacks": list}, "leave callbacks out"),
        (
            {"clock": "virtual", "strategy": AllReduce("ring"), "callbacks": list},
            "leave callbacks out",
        ),
        ({"strategy": {"name": "ParameterServer", "placement": "fair"}}, "round_robin"),
        ({"strategy": {"name": "ParameterServer", "optimizer": "magic"}}, "optimizer='magic'"),
        ({"clock": "virtual", "compute": ComputeTime(0.1), "order": [(1,)]}, "order"),
    ],
)
def test_what_servers_cannot_do_is_refused_before_a_rank_starts(
    fields: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        Experiment(**SMALL | {"workers": 2, "strategy": ParameterServer(1)} | fields)


def test_servers_apart_want_ranks_of_their_own(cluster: Cluster) -> None:
    wanted = experiment(ParameterServer(2), 3)
    assert wanted.ranks == 5
    assert wanted.replace(clock="virtual").ranks == 1
    with pytest.raises(InvalidInput, match=r"2 servers apart from them on a cluster of 4"):
        cluster.run(wanted)
