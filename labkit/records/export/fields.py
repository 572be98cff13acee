"""The fields of a run for experiment trackers: parameters, results, curves, and tags."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import LabkitError
from labkit.common.privacy import scrub
from labkit.records.pace import with_end_times
from labkit.records.run import Run, flatten, verdict
from labkit.records.store import Record

if TYPE_CHECKING:
    import pandas

STEP_CURVES = (
    "loss",
    "seconds",
    "compute_seconds",
    "communicate_seconds",
    "wait_seconds",
    "wire_bytes",
)


class Point(NamedTuple):
    """A point of a curve: the curve's name, step, time in seconds since 1970, and value."""

    name: str
    step: int
    time: float
    value: float


def require_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs as a list; raise an error if there are none.

    Raises:
        LabkitError: If the argument contains no runs.
    """
    run_list = list(runs)
    if not run_list:
        raise LabkitError(
            "no runs to export; give runs, or a folder that contains runs (usually runs/)"
        )
    return run_list


def parameters(run: Run) -> dict[str, str | float | bool]:
    """Return the fields of a run's experiment by dotted name, such as `strategy.algorithm`.

    Names of machines and users are removed from the texts.
    """
    flat = flatten(run.experiment)
    return {
        name: value if isinstance(value, bool | int | float) else _text(value)
        for name, value in flat.items()
    }


def results(run: Run) -> dict[str, float]:
    """Return all metrics that are finite numbers, by dotted name such as `step_ms.median`."""
    return {name: float(v) for name, v in flatten(run.metrics).items() if _is_finite(v)}


def tags(run: Run) -> dict[str, str]:
    """Return a run's tags: name, state, cause of failure, and verdict of verification."""
    status = run.status
    values = {"run": run.name, "state": status["state"], "equivalence": verdict(run)}
    values |= {"cause": status["cause"]} if status.get("cause") else {}
    return {f"labkit.{name}": _text(value) for name, value in values.items()}


def timestamp(run: Run, moment: str) -> float:
    """Return when a run "started" or "ended", in seconds since 1970; 0 if the time is unknown."""
    timestamp = run.status.get(moment)
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def points(run: Run) -> Iterator[Point]:
    """Yield a run's curves: means over ranks and seeds at each step, and metrics of each epoch."""
    begin = timestamp(run, "started")
    yield from step_points(run.history, begin)
    yield from epoch_points(run.metrics.get("epochs", []), begin)


def step_points(history: pandas.DataFrame, begin: float) -> Iterator[Point]:
    """Yield the curves of a history by step; `begin` is the run's start in s since 1970."""
    steps = with_end_times(history).groupby("step").mean(numeric_only=True)
    # A history contains only durations of training steps, so the times of the points exclude
    # evaluations between epochs.
    clock = begin + steps["ended"].fillna(0.0)
    for name in STEP_CURVES:
        for step, value in steps[name].dropna().items():
            yield Point(f"step/{name}", int(step), float(clock[step]), float(value))


def epoch_points(epochs: Iterable[Record], begin: float) -> Iterator[Point]:
    """Yield the curves of metrics after epochs; `begin` is the run's start in s since 1970."""
    for row in epochs:
        for name, value in row.items():
            if name not in ("epoch", "step", "seconds") and _is_finite(value):
                time = begin + (row.get("seconds") or 0.0)
                yield Point(f"epoch/{name}", int(row["step"]), time, float(value))


def _text(value: JSON) -> str:
    return "none" if value is None else scrub(str(value))


def _is_finite(value: JSON) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)
