"""Replay of a parameter-server run on the virtual clock, unchanged or with changed fields."""

from __future__ import annotations

from typing import Any

from labkit.cluster.cluster import run as run_experiment
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment, VirtualClock
from labkit.network import ComputeTime
from labkit.records.run import Run


def replay(run: Run, show: bool = True, **changes: Any) -> Run:
    """Simulate a run with parameter servers again, and return the record of the replay.

    Without changes, the servers apply the gradients in the recorded order, so the weights are the
    same, even if the run used the wall clock. With changes, the order of the updates follows from
    the compute times, which are the recorded times unless a change replaces them.

    Args:
        run: A completed run of a strategy with servers.
        show: Whether to show progress, see `labkit.run`.
        changes: New values of fields of the experiment, such as `stragglers={1: 3.0}`,
            `strategy=…`, or `message_delays=[(worker, step, seconds)]`, whose entries delay one
            gradient each.

    Raises:
        InvalidInput: The run has no update log, or its model or data set is not given by name.
    """
    return run_experiment(replay_experiment(run, **changes), show=show)


def replay_experiment(run: Run, **changes: Any) -> Experiment:
    """Return the experiment that `replay` runs, on the virtual clock."""
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
    assert base.virtual is not None  # tells the type checker what `_times` has set
    if not changes:
        order = run.update_log.sort_values(["delivered", "applied"], kind="stable")
        rows = (tuple(map(int, row)) for row in order[["server", "worker", "step"]].to_numpy())
        return base.replace(virtual=_with(base.virtual, update_order=[*rows]))
    if virtual := changes.get("virtual"):
        recorded = base.virtual.compute_time
        changes["virtual"] = _with(virtual, compute_time=virtual.compute_time or recorded)
    return base.replace(**changes)


def _with(virtual: VirtualClock, **fields: Any) -> VirtualClock:
    """Return the same virtual clock with other values for these fields, validated again."""
    return VirtualClock(
        **{name: getattr(virtual, name) for name in VirtualClock.model_fields} | fields
    )


def _times(run: Run, base: Experiment) -> dict[str, Any]:
    """Return the experiment's fields that give each gradient its recorded compute time."""
    if run.experiment["clock"] == "virtual":
        timing = run.metrics["exchange"]
        virtual = run.experiment.get("virtual") or {}
        compute_time = virtual.get("compute_time") or {}
        if compute_time.get("seconds") is None and compute_time.get("trace") is None:
            compute_time = {**compute_time, "seconds": timing["compute_seconds"]}
        time = ComputeTime(**compute_time | {"update": timing["update_seconds"]})
        return {"virtual": VirtualClock(**virtual | {"compute_time": time, "update_order": ()})}
    # A replica may be split over several ranks, whose compute times are added.
    spent = run.history.pivot_table("compute_seconds", "rank", "step", "first")
    places = [base.strategy.places(w, base.workers) for w in range(base.workers)]
    values = tuple(tuple(spent.loc[ranks].sum(skipna=False).dropna()) for ranks in places)
    # The recorded times include the effect of stragglers.
    return {"stragglers": {}, "virtual": VirtualClock(compute_time=ComputeTime(trace=values))}
