"""Test parameter servers against one process and against reference servers, on both clocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from labkit import (
    DGC,
    QSGD,
    AllReduce,
    Cluster,
    Downpour,
    ErrorFeedback,
    Experiment,
    ParameterAveraging,
    ParameterServer,
    PowerSGD,
    SoftSync,
    StaleSynchronous,
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
CONVOLUTION = {"model": "cnn", "model_options": {"filters": [3, 2], "dense": 6}}
UNSHARED = {"model": "locally_connected", "model_options": {"filters": [2]}}
VIRTUAL = {"virtual": {"compute_time": 0.01}, "network": "1GbE"}


def verify(communicator: Any, experiments: list[Experiment], cache: str) -> list[dict[str, Any]]:
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    return [dict(equivalence.verify(e, communicator, read(e, communicator))) for e in experiments]


def verdicts(cluster: Cluster, experiments: list[Experiment]) -> list[dict[str, Any]]:
    """Return the verdicts of experiments that need the same number of ranks."""
    cache = str(Path.cwd() / "cache")
    told = cluster.call(verify, experiments, cache, ranks=experiments[0].ranks)
    assert all(each == told[0] for each in told)
    return told[0]


def virtual(**times: Any) -> dict[str, Any]:
    """Fields of an experiment with these times on the virtual clock."""
    return VIRTUAL | {"virtual": {"compute_time": 0.01, **times}}


def experiment(strategy: Any, workers: int, **fields: Any) -> Experiment:
    return Experiment(**SMALL | {"strategy": strategy, "workers": workers} | fields)


EXACT = [
    experiment(ParameterServer(1), 3, **virtual(message_delays=[(0, 1, 0.5)])),
    experiment(ParameterServer(3, placement="sharded"), 2, optimizer="adam", **VIRTUAL),
    experiment(ParameterServer(2, placement="greedy"), 3, **MOMENTUM, **VIRTUAL),
    experiment(ParameterServer(2, colocated=True), 3, batch_weights=(1, 2, 1), **VIRTUAL),
    experiment(AllReduce("ring"), 3, optimizer="adam", **VIRTUAL),
    experiment(StaleSynchronous(0, servers=2), 3, optimizer="adam", **VIRTUAL),
    experiment(ParameterAveraging(1, optimizer_state="average"), 3, **MOMENTUM, **VIRTUAL),
    experiment(AllReduce("ring"), 3, data_partition="dirichlet(0.3)", **VIRTUAL),
    experiment(
        ParameterServer(2), 3, data_partition="by_label", batch_weights=(1, 2, 1), **VIRTUAL
    ),
    experiment(ParameterServer(2, stages=2, placement="sharded"), 3, optimizer="adam", **VIRTUAL),
    experiment(ParameterServer(2, grid=(2, 2), placement="sharded"), 2, **UNSHARED, **VIRTUAL),
]
REPLAYED = [
    experiment(ParameterServer(2, synchronous=False), 3, **MOMENTUM, **VIRTUAL),
    experiment(ParameterServer(1, synchronous=False), 1, optimizer="adam", **VIRTUAL),
    experiment(ParameterServer(1, backup_workers=1), 3, stragglers={2: 3.0}, **VIRTUAL),
    experiment(StaleSynchronous(2, servers=2), 3, stragglers={0: 4.0}, **MOMENTUM, **VIRTUAL),
    experiment(SoftSync(3, staleness_correction="per_gradient"), 4, optimizer="adam", **VIRTUAL),
    experiment(SoftSync(2, staleness_correction="mean"), 4, optimizer="adagrad", **VIRTUAL),
    experiment(
        SoftSync(4, staleness_correction="delay_compensated", servers=2),
        4,
        stragglers={0: 3.0},
        **VIRTUAL,
    ),
    experiment(SoftSync(4, staleness_correction="momentum"), 4, **MOMENTUM, **VIRTUAL),
    experiment(StaleSynchronous(1, staleness_correction="mean"), 3, stragglers={1: 3.0}, **VIRTUAL),
    experiment(
        ParameterServer(2, synchronous=False), 3, **MOMENTUM, **virtual(worker_failures={1: 0.05})
    ),
    experiment(StaleSynchronous(1), 3, **virtual(worker_failures={0: 0.05})),
    experiment(ParameterServer(1, backup_workers=1), 3, **virtual(worker_failures={2: 0.05})),
    experiment(Downpour(servers=2), 3, data_partition="dirichlet(0.3)", **VIRTUAL),
    experiment(
        Downpour(servers=2, stages=2), 3, stragglers={1: 3.0}, **virtual(worker_failures={2: 0.05})
    ),
    experiment(
        Downpour(servers=2, grid=(1, 2)), 3, **CONVOLUTION, **virtual(worker_failures={2: 0.05})
    ),
    experiment(
        SoftSync(2, staleness_correction="per_gradient", compressor=ErrorFeedback(TopK(ratio=0.2))),
        4,
        stragglers={0: 3.0},
        data_partition="by_label",
        **VIRTUAL,
    ),
]


@pytest.mark.exhaustive
def test_on_the_virtual_clock_they_do_what_one_process_does(cluster: Cluster) -> None:
    for each, found in zip(EXACT, verdicts(cluster, EXACT), strict=True):
        assert found["verdict"] == "passed", (each, found)
        assert found["max_abs_difference"] < 1e-12, each


@pytest.mark.battery(2, 4)
@pytest.mark.parametrize(
    "wanted",
    [
        experiment(ParameterServer(2, placement="sharded"), 2, **MOMENTUM),
        experiment(
            ParameterServer(2, colocated=True), 3, optimizer="adam", data_partition="by_label"
        ),
        experiment(ParameterServer(1, transport="one_sided"), 3, optimizer="adam"),
        experiment(ParameterServer(2, transport="one_sided", placement="greedy"), 2, **MOMENTUM),
        experiment(ParameterServer(3, transport="one_sided", colocated=True), 3),
        experiment(ParameterServer(1, transport="one_sided_dynamic"), 2, **MOMENTUM),
        experiment(ParameterAveraging(1), 3),
        experiment(ParameterServer(2, stages=2, placement="sharded"), 1, optimizer="adam"),
    ],
    ids=[
        *("apart", "colocated", "one, one-sided", "apart, one-sided", "colocated, one-sided"),
        *("fetched", "averaging", "in stages"),
    ],
)
def test_on_ranks_they_do_what_one_process_does(cluster: Cluster, wanted: Experiment) -> None:
    (found,) = verdicts(cluster, [wanted])
    assert found["verdict"] == "passed", found
    assert found["max_abs_difference"] < 1e-12


@pytest.mark.exhaustive
def test_what_is_not_exact_is_replayed_by_servers_written_anew(cluster: Cluster) -> None:
    for each, found in zip(REPLAYED, verdicts(cluster, REPLAYED), strict=True):
        assert found["verdict"] == "passed", (each, found)
        assert "replayed" in found["reason"]


ASYNCHRONOUS: dict[str, Any] = {"synchronous": False, "transport": "one_sided"}


@pytest.mark.battery(2, 3)
@pytest.mark.parametrize(
    "wanted",
    [
        experiment(ParameterServer(2, synchronous=False, colocated=True), 2, optimizer="adagrad"),
        # Three workers write to and read from each other, so one withheld message would block all.
        experiment(ParameterServer(3, colocated=True, **ASYNCHRONOUS), 3, **MOMENTUM),
        experiment(ParameterServer(1, **ASYNCHRONOUS), 2, network="1GbE"),
        experiment(StaleSynchronous(1, staleness_correction="per_gradient", colocated=True), 2),
        experiment(Downpour(servers=2, stages=2, colocated=True), 2, network="1GbE"),
        experiment(Downpour(grid=(1, 2)), 1, **CONVOLUTION),
        experiment(Downpour(grid=(2, 1), colocated=True), 2, network="1GbE", **UNSHARED),
    ],
    ids=[
        *("two-sided", "colocated, one-sided", "apart, one-sided, emulated", "stale", "in stages"),
        *("over a grid", "over grids, colocated, emulated"),
    ],
)
def test_so_is_what_ranks_did(cluster: Cluster, wanted: Experiment) -> None:
    (found,) = verdicts(cluster, [wanted])
    assert found["verdict"] == "passed", found
    assert found["max_abs_difference"] < 1e-9


def test_replicas_with_steps_of_their_own_are_not_replayed(cluster: Cluster) -> None:
    strategy = Downpour(fetch_every=3, push_every=2)
    (found,) = verdicts(cluster, [experiment(strategy, 3, **VIRTUAL)])
    assert found["verdict"] == "not applicable"
    assert "local steps" in found["reason"]


def trained(communicator: Any, experiments: list[Experiment]) -> list[list[Any]]:
    """Return the weights of each experiment, on its own clock."""
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


@pytest.mark.slow
def test_a_compressed_allreduce_is_the_same_on_both_clocks(cluster: Cluster) -> None:
    compressors = [TopK(ratio=0.2, threshold="exact"), ErrorFeedback(QSGD(levels=127)), PowerSGD()]
    wall = [
        experiment(AllReduce("ring", compressor=each), 2, precision="float64", epochs=2)
        for each in compressors
    ]
    virtual = [each.replace(virtual={"compute_time": 0.01}, network="1GbE") for each in wall]
    ours = cluster.call(trained, wall, ranks=2)[0]
    theirs = cluster.call(trained, virtual, ranks=1)[0]
    for compressor, one, other in zip(compressors, ours, theirs, strict=True):
        apart = max(abs(a - b).max() for a, b in zip(one, other, strict=True))
        assert apart < 1e-12, compressor


class Rows(list[dict[str, float]]):
    """A recorder that only keeps the rows in a list."""

    def __init__(self) -> None:
        self.put = self.append

    def put_epoch(self, row: dict[str, float]) -> None:
        """Ignore the epoch: the test does not read it."""

    def is_stop_requested(self) -> bool:
        """Return False: the test never stops training early."""
        return False


def said(communicator: Any, wanted: Experiment) -> tuple[list[Any], list[dict[str, float]]]:
    """Return the trained weights and the rows of this rank."""
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session: Any = TrainingSession(wanted, communicator, read(wanted, communicator))
    session.feed.validation, rows = None, Rows()
    session.recorder = rows
    wanted.strategy.train(session)
    session.close()
    return [weight.numpy() for weight in session.model.weights], list(rows)


FEW = ErrorFeedback(TopK(ratio=0.1, threshold="exact"))


@pytest.mark.parametrize(
    ("compressor", "more"),
    [
        (FEW, {"transport": "one_sided_dynamic"}),
        pytest.param(FEW, {"transport": "one_sided"}, marks=pytest.mark.slow),
        pytest.param(ErrorFeedback(QSGD(levels=127)), {}, marks=pytest.mark.slow),
        pytest.param(
            PowerSGD(), {"colocated": True, "transport": "one_sided"}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_servers_that_say_less_are_the_same_on_both_clocks(
    cluster: Cluster, compressor: Any, more: dict[str, Any]
) -> None:
    strategy = ParameterServer(2, compressor=compressor, **more)
    wall = experiment(strategy, 2, precision="float64", epochs=2)
    ours = cluster.call(said, wall, ranks=wall.ranks)
    ((theirs, virtual),) = cluster.call(said, wall.replace(**VIRTUAL), ranks=1)
    assert max(abs(a - b).max() for a, b in zip(ours[0][0], theirs, strict=True)) < 1e-12
    rows = [row for _, own in ours for row in own]
    nbytes = [{row["payload_bytes"] for row in each} for each in (rows, virtual)]
    assert nbytes[0] == nbytes[1]
    assert max(nbytes[0]) < 2 * 8 * (64 * 8 + 8 + 8 * 10 + 10)  # pushes and answers
    assert all(row["codec_seconds"] > 0 for row in rows)
    if compressor is FEW:
        # One server holds kernels of 512 and 80 elements, the other biases of 8 and 10; both
        # directions send a tenth of each as indices, values and length.
        assert nbytes[0] == {2 * sum((4 + 4 * k) + (4 + 8 * k) + (4 + 4) for k in (59, 2))}


def test_all_elements_said_are_all_there_is(cluster: Cluster) -> None:
    (everything, _), (plain, _) = (
        cluster.call(said, experiment(strategy, 2, precision="float64", **VIRTUAL), ranks=1)[0]
        for strategy in (
            ParameterServer(2, compressor=TopK(ratio=1.0, threshold="exact")),
            ParameterServer(2),
        )
    )
    assert max(abs(a - b).max() for a, b in zip(everything, plain, strict=True)) < 1e-12


# With 20 rows in batches of 18, some workers have no row in the last batch.
SHORT = {"dataset_options": {"rows": 20, "test_rows": 10}, "batch_size": 18}


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    "wanted",
    [
        experiment(
            ParameterServer(1, synchronous=False, compressor=FEW), 3, **VIRTUAL | SHORT, **MOMENTUM
        ),
        experiment(Downpour(compressor=FEW), 3, **VIRTUAL | SHORT),
        # The correction compares with the weights that the worker holds by now.
        experiment(
            StaleSynchronous(
                1, staleness_correction="delay_compensated", delay_compensation=0.5, compressor=FEW
            ),
            3,
            stragglers={0: 3.0},
            **VIRTUAL,
        ),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                experiment(ParameterServer(2, compressor=FEW.inner), 3, **MOMENTUM, **VIRTUAL),
                experiment(
                    ParameterServer(1, backup_workers=1, compressor=ErrorFeedback(PowerSGD())),
                    3,
                    optimizer="adam",
                    stragglers={2: 3.0},
                    **VIRTUAL,
                ),
                experiment(
                    ParameterServer(2, compressor=ErrorFeedback(QSGD(levels=127)), **ASYNCHRONOUS),
                    2,
                ),
            )
        ),
    ],
    ids=[
        *("rows run out", "a replica's, too", "delay-compensated"),
        *("all are waited for", "one comes too late", "ranks"),
    ],
)
def test_what_was_said_is_said_again_by_servers_written_anew(
    cluster: Cluster, wanted: Experiment
) -> None:
    (found,) = verdicts(cluster, [wanted])
    assert found["verdict"] == "passed", found
    assert found["max_abs_difference"] < 1e-9


def swapped(communicator: Any, wanted: Experiment, cache: str) -> dict[str, Any]:
    """Return the verdict when workers 0 and 1 compute at each other's latest weights."""
    from labkit.programs.replica import Replica
    from labkit.worker import equivalence
    from labkit.worker.feed import read

    os.environ["LABKIT_CACHE"] = cache
    plain, last = Replica.gradient, {}

    def gradient(own: Any, worker: int, weights: Any) -> Any:
        last[worker] = weights
        return plain(own, worker, last.get(1 - worker, weights) if worker < 2 else weights)

    Replica.gradient = gradient  # type: ignore[method-assign]
    try:
        return dict(equivalence.verify(wanted, communicator, read(wanted, communicator)))
    finally:
        Replica.gradient = plain  # type: ignore[method-assign]


def test_weights_that_were_swapped_on_their_way_are_found_out(cluster: Cluster) -> None:
    wanted = experiment(ParameterServer(1, synchronous=False), 3, **VIRTUAL)
    cache = str(Path.cwd() / "cache")
    (found,) = cluster.call(swapped, wanted, cache, ranks=1)
    assert found["verdict"] == "failed"
    assert "the largest difference" in found["reason"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"strategy": ParameterServer(1, backup_workers=2)},
            "leave no gradient .* allowed: 0 to 1",
        ),
        (
            {"strategy": ParameterServer(3, colocated=True)},
            "exceeds workers=2, whose ranks run the servers",
        ),
        (
            {"strategy": ParameterServer(1, synchronous=False, backup_workers=1)},
            "wait for no gradient",
        ),
        (
            {
                "strategy": ParameterServer(2, placement="sharded"),
                "optimizer_options": {"clipnorm": 1.0},
            },
            "needs the norm of whole gradients, but a server holds",
        ),
        (
            {"strategy": ParameterServer(2), "optimizer_options": {"global_clipnorm": 1.0}},
            "needs the norm of all gradients",
        ),
        (
            {"strategy": ParameterServer(1, compressor="SignSGD")},
            "takes a majority vote of all ranks",
        ),
        ({"strategy": ParameterServer(1, compressor=DGC())}, "differences of weights, to which"),
        (
            {"strategy": ParameterServer(1, compressor=QSGD(levels=1))},
            "an error whose norm can exceed",
        ),
        ({"precision": "mixed_float16"}, "use precision='mixed_bfloat16'"),
        ({"input_mode": "scatter"}, "use input_mode='shard'"),
        ({"clock": "wall", "virtual": {}}, "use clock='virtual'"),
        ({"stragglers": {2: 2.0}}, "give worker numbers from 0 to workers - 1"),
        ({"clock": "virtual", "strategy": "Pipeline"}, "allowed: AllReduce, ParameterServer"),
        ({"clock": "virtual", "strategy": AllReduce("mpi")}, "no communication schedule"),
        (
            {"clock": "virtual", "strategy": AllReduce("ring"), "precision": "mixed_float16"},
            "use precision='mixed_bfloat16'",
        ),
        ({"callbacks": list}, "remove callbacks"),
        (
            {"clock": "virtual", "strategy": AllReduce("ring"), "callbacks": list},
            "remove callbacks",
        ),
        ({"strategy": {"name": "ParameterServer", "placement": "fair"}}, "round_robin"),
        ({"strategy": {"name": "ParameterServer", "optimizer": "magic"}}, "optimizer='magic'"),
        ({"virtual": {"update_order": [(1,)]}}, "update_order"),
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
    with pytest.raises(
        InvalidInput, match="2 further ranks are more than the 4 ranks of the cluster"
    ):
        cluster.run(wanted)
