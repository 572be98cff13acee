"""A run with servers, played again on the virtual clock: as it was, or with one thing changed."""

from __future__ import annotations

from typing import Any

from labkit.cluster.cluster import run as run_experiment
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.network import ComputeTime
from labkit.records.run import Run


def replay(run: Run, show: bool = True, **changes: Any) -> Run:
    """Play a run's programs again, and return the record of that.

    Without changes servers take the gradients in the order in which they took them before, so that
    the weights come out the same, from the wall clock, too. With changes, times decide anew: those
    of the run, where nothing is changed.

    Args:
        run: completed, of a strategy with servers.
        show: as of `labkit.run`.
        changes: fields of its experiment, such as `slow={1: 3.0}`, `strategy=…`, or
            `later=[(worker, step, seconds)]`: this gradient is so much longer on its way.

    Raises:
        InvalidInput: the run has no interleaving, or its experiment is not made of names alone.
    """
    return run_experiment(again(run, **changes), show=show)


def again(run: Run, **changes: Any) -> Experiment:
    """The experiment that `replay` runs."""
    if run.interleaving.empty:
        raise InvalidInput(
            f"{run.name} has no interleaving (state: {run.status['state']}); a completed run with "
            "servers has one: strategy=ParameterServer(…)"
        )
    record = run.experiment
    if not isinstance(record["model"], str) or not isinstance(record["dataset"], str):
        raise InvalidInput(
            f"{run.name} was made with objects of your own, which its record cannot bring back; "
            "model and dataset must be names"
        )
    base = Experiment(**record).replace(repeats=1, order=())
    base = base.replace(**_times(run, base))
    if not changes:
        order = run.interleaving.sort_values(["delivered", "applied"], kind="stable")
        rows = order[["server", "worker", "step"]].itertuples(index=False)
        return base.replace(order=[tuple(map(int, row)) for row in rows])
    return base.replace(**changes)


def _times(run: Run, base: Experiment) -> dict[str, Any]:
    """The fields that give each gradient the time that it took."""
    if run.experiment["clock"] == "virtual":
        laws = run.metrics["exchange"]
        given = run.experiment.get("compute") or {}
        if given.get("seconds") is None and given.get("values") is None:
            given = {**given, "seconds": laws["compute_seconds"]}
        return {"compute": ComputeTime(**given | {"update": laws["update_seconds"]})}
    # What a replica computes is divided among its places.
    spent = run.history.pivot_table("compute_seconds", "rank", "step", "first")
    places = [base.strategy.places(w, base.workers) for w in range(base.workers)]
    values = tuple(tuple(spent.loc[own].sum(skipna=False).dropna()) for own in places)
    # What made a worker slow is in the times already.
    return {"clock": "virtual", "slow": {}, "compute": ComputeTime(values=values)}
