"""Measurement of inference on ranks, and the replay of a recorded run on the virtual clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from labkit.cluster.cluster import Cluster
from labkit.cluster.cluster import run as run_experiment
from labkit.cluster.prediction import plan_prediction, validate_rows
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.files import usable_cores
from labkit.experiment import Experiment, VirtualClock
from labkit.network import ComputeTime, Network
from labkit.records.analysis.serving_runs import (
    TOLERANCE,
    ServingMeasurements,
    serving_measurements,
)
from labkit.records.run import Run
from labkit.strategies import AllReduce, Pipeline, Strategy, TensorParallel
from labkit.worker import serving

OWN_NETWORK = "this machine's own"
WAYS: Mapping[str, Strategy] = MappingProxyType(
    {"replicas": AllReduce(), "stages": Pipeline(), "slices": TensorParallel()}
)


def serve(
    cluster: Cluster,
    run: Run | Path | str,
    x: np.ndarray,
    ways: Mapping[str, Strategy] = WAYS,
    networks: Sequence[str | Network | None] = (None,),
    batch_sizes: Sequence[int] = (1, 256),
    repeats: int = 30,
    streams: int = 5,
    under_way: int = 8,
    workers: int | None = None,
) -> ServingMeasurements:
    """Measure the latency and the throughput of inference on rows that arrive at rank 0.

    Latency starts when a single batch arrives at rank 0. Latency ends when rank 0 has the
    predictions of the batch. Throughput is measured on a stream of batches that are ready at rank
    0. Rank 0 sends the next batch while the ranks compute. With data parallelism, each replica
    computes a whole batch, and batches go to the replicas in turn. A pipeline has as many batches
    in flight as ranks. Tensor-parallel ranks compute each batch together. Inference on rank 0 alone
    is measured for comparison.

    Args:
        cluster: Cluster whose ranks are measured.
        run: A completed run, or a .keras file.
        x: Rows of shape (rows, …) for the model's single input.
        ways: Strategies to measure, as a mapping from display name to strategy; see
            `Strategy.serving`.
        networks: Networks to emulate; None: no emulation.
        batch_sizes: Batch sizes to measure, in rows.
        repeats, streams: Number of timed single batches, and number of timed streams. The numbers
            `repeats` and `streams` apply to each strategy, network and batch size.
        under_way: Number of batches in one stream.
        workers: Number of ranks; None: all ranks of the cluster.

    Raises:
        InvalidInput: A number is below 1, or fewer than two ranks are given. `InvalidInput` is also
            raised if a strategy cannot divide the model.
        LabkitError: The predictions differ from those of one process by more than rounding
            explains.
    """
    numbers = {"repeats": repeats, "streams": streams, "under_way": under_way}
    for name, value in numbers.items():
        if value < 1:
            raise InvalidInput(f"{name}={value} is impossible; give a whole number of at least 1")
    count = cluster.workers if workers is None else workers
    if count < 2:
        raise InvalidInput(
            "parallel inference requires at least two ranks; use Cluster(workers=2) or more"
        )
    for size in batch_sizes:
        validate_rows(x, size)
    known = {
        OWN_NETWORK if network is None else str(network): Network.parse(network)
        for network in networks
    }
    if not batch_sizes or not known or not ways:
        raise InvalidInput(
            "no measurement was requested: give at least one of each of batch_sizes, "
            "networks and ways"
        )
    # All strategies are validated before any rank loads the model.
    first, *_ = [
        plan_prediction(run, strategy, count, cluster.workers) for strategy in ways.values()
    ]
    model = first.model(cluster.how.is_local)
    spec = serving.ServingSpec(
        model, x, dict(ways), known, batch_sizes, repeats, streams, under_way
    )
    results = cluster.call(serving.serve, spec, ranks=count)
    result = results[0]
    allowed = TOLERANCE * result.precision * result.largest
    for way, difference in result.differences.items():
        if not difference <= allowed:
            raise LabkitError(
                f"the predictions of {way} differ from those of one process by {difference:.3g}, "
                f"but rounding explains at most {allowed:.3g}; times of wrong predictions are "
                "not shown"
            )
    return serving_measurements(
        result.times,
        [rank_result.weights_bytes for rank_result in results],
        result.differences,
        allowed,
        count,
        cluster.threads,
        usable_cores(),
        under_way,
    )


def replay(run: Run, show: bool = True, **changes: Any) -> Run:
    """Simulate a recorded run with parameter servers, and return the new, simulated run.

    If `changes` is empty, the servers apply the gradients in the recorded order. If `changes` is
    empty, `replay` reproduces the final weights of the recorded run. `replay` reproduces the
    weights even of runs on the wall clock. If `changes` is not empty, the simulated compute times
    determine the order of the updates. `replay` uses the recorded compute times, unless a change
    replaces them.

    Args:
        run: A completed run of a strategy with servers.
        show: Whether to show progress, see `labkit.run`.
        changes: New values of experiment fields, such as `stragglers={1: 3.0}` or `strategy=…`.
            Each entry of `message_delays=[(worker, step, seconds)]` delays one gradient.

    Raises:
        InvalidInput: The run has no update log. A run with an object as model or data set also
            raises `InvalidInput`.
    """
    return run_experiment(replay_experiment(run, **changes), show=show)


def replay_experiment(run: Run, **changes: Any) -> Experiment:
    """Return the experiment that `replay` runs; it uses the virtual clock."""
    if run.update_log.empty:
        raise InvalidInput(
            f"{run.name} has no update log (state: {run.status['state']}); give a completed run "
            "with parameter servers: strategy=ParameterServer(…)"
        )
    record = run.experiment
    if not isinstance(record["model"], str) or not isinstance(record["dataset"], str):
        raise InvalidInput(
            f"{run.name} trained a model or data set that was given as an object, which its "
            "record cannot restore; replay a run whose model and dataset are names"
        )
    base = Experiment(**record).replace(repeats=1)
    base = base.replace(clock="virtual", **_times(run, base))
    # The assert tells the type checker that `_times` has set the field `virtual`.
    assert base.virtual is not None
    if not changes:
        order = run.update_log.sort_values(["delivered", "applied"], kind="stable")
        rows = (tuple(map(int, row)) for row in order[["server", "worker", "step"]].to_numpy())
        return base.replace(virtual=_with(base.virtual, update_order=[*rows]))
    if virtual := changes.get("virtual"):
        recorded = base.virtual.compute_time
        changes["virtual"] = _with(virtual, compute_time=virtual.compute_time or recorded)
    return base.replace(**changes)


def _with(virtual: VirtualClock, **fields: Any) -> VirtualClock:
    """Return a validated copy of a virtual clock with the new values `fields`."""
    return VirtualClock(
        **{name: getattr(virtual, name) for name in VirtualClock.model_fields} | fields
    )


def _times(run: Run, base: Experiment) -> dict[str, Any]:
    """Return the experiment fields that reproduce the recorded compute time of each gradient."""
    if run.experiment["clock"] == "virtual":
        timing = run.metrics["exchange"]
        virtual = run.experiment.get("virtual") or {}
        compute_time = virtual.get("compute_time") or {}
        if compute_time.get("seconds") is None and compute_time.get("trace") is None:
            compute_time = {**compute_time, "seconds": timing["compute_seconds"]}
        time = ComputeTime(**compute_time | {"update": timing["update_seconds"]})
        return {"virtual": VirtualClock(**virtual | {"compute_time": time, "update_order": ()})}
    # If a replica is split over several ranks, the compute times of these ranks are added.
    spent = run.history.pivot_table("compute_seconds", "rank", "step", "first")
    places = [base.strategy.places(w, base.workers) for w in range(base.workers)]
    values = tuple(tuple(spent.loc[ranks].sum(skipna=False).dropna()) for ranks in places)
    # No stragglers are simulated, because the recorded times already include their effect.
    return {"stragglers": {}, "virtual": VirtualClock(compute_time=ComputeTime(trace=values))}
