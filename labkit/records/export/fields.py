"""What a tool that tracks experiments is told of a run: parameters, results, curves and tags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records.pace import in_order
from labkit.records.run import Run, flatten, verdict
from labkit.records.store import Record

if TYPE_CHECKING:
    import pandas

STEP = ("loss", "seconds", "compute_seconds", "communicate_seconds", "wait_seconds", "wire_bytes")


class Point(NamedTuple):
    """One number of a curve, and when it was measured (seconds since 1970)."""

    name: str
    step: int
    time: float
    value: float


def at_least_one(runs: Iterable[Run]) -> list[Run]:
    """The runs to export.

    Raises: LabkitError, where there is none.
    """
    found = list(runs)
    if not found:
        raise LabkitError("no runs to export: give runs, or a folder that has some (usually runs/)")
    return found


def parameters(run: Run) -> dict[str, str | float | bool]:
    """The experiment's fields by name (`strategy.algorithm`); texts name no machine."""
    flat = flatten(run.experiment)
    return {
        name: value if isinstance(value, bool | int | float) else _text(value)
        for name, value in flat.items()
    }


def results(run: Run) -> dict[str, float]:
    """The metrics that are finite numbers, by name (`step_ms.median`)."""
    return {name: float(v) for name, v in flatten(run.metrics).items() if _is_finite(v)}


def tags(run: Run) -> dict[str, str]:
    """Name, state, cause of a failure, and the gate's verdict."""
    status = run.status
    told = {"run": run.name, "state": status["state"], "gate": verdict(run)}
    told |= {"cause": status["cause"]} if status.get("cause") else {}
    return {f"labkit.{name}": _text(value) for name, value in told.items()}


def moment(run: Run, which: str) -> float:
    """When the run `started` or `ended`, in seconds since 1970; 0 where that is not recorded."""
    said = run.status.get(which)
    return datetime.fromisoformat(said).timestamp() if said else 0.0


def points(run: Run) -> Iterator[Point]:
    """The curves: a step's means over ranks (and seeds), and what was evaluated after epochs."""
    begin = moment(run, "started")
    yield from step_points(run.history, begin)
    yield from epoch_points(run.metrics.get("epochs", []), begin)


def step_points(history: pandas.DataFrame, begin: float) -> Iterator[Point]:
    """The curves of rows of a history, which begins at this moment."""
    steps = in_order(history).groupby("step").mean(numeric_only=True)
    # A history says how long steps took, and not when they were: evaluation between epochs is
    # missing.
    clock = begin + steps["ended"].fillna(0.0)
    for name in STEP:
        for step, value in steps[name].dropna().items():
            yield Point(f"step/{name}", int(step), float(clock[step]), float(value))


def epoch_points(epochs: Iterable[Record], begin: float) -> Iterator[Point]:
    """The curves of what was evaluated after epochs."""
    for row in epochs:
        for name, value in row.items():
            if name not in ("epoch", "step", "seconds") and _is_finite(value):
                time = begin + (row.get("seconds") or 0.0)
                yield Point(f"epoch/{name}", int(row["step"]), time, float(value))


def _text(value: JSON) -> str:
    return "none" if value is None else scrub(str(value))


def _is_finite(value: JSON) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)
