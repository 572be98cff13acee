"""Replay of a parameter-server run on the virtual clock, with the same or changed fields."""

from __future__ import annotations

from typing import Any

from labkit.cluster.cluster import run as run_experiment
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment, VirtualClock
from labkit.network import ComputeTime
from labkit.records.run import Run


def replay(run: Run, show: bool = True, **changes: Any) -> Run:
    """Simulate a run with parameter servers again, and return the run of the simulation.

    If `changes` is empty, the servers apply the gradients in the recorded order. If `changes` is
    empty, the final weights equal those of the recorded run, even if the run used the wall clock.
    If `changes` contains fields, the order of the updates follows from the compute times. `replay`
    uses the recorded compute times, unless a change replaces them.

    Args:
        run: A completed run of a strategy with servers.
        show: Whether to show progress, see `labkit.run`.
        changes: New values of experiment fields, such as `stragglers={1: 3.0}` or `strategy=…`.
            Each entry of `message_delays=[(worker, step, seconds)]` delays one gradient.

    Raises:
        InvalidInput: The run has no update log, or its model or data set is an object instead of a
            name.
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
    assert base.virtual is not None  # tells the type checker that `_times` has set `virtual`
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
