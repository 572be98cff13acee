"""Steps in the timeline of a run: steps after warm-up, step durations, and ranks' activities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

WARM_UP_STEPS = 10  # number of first steps that count as warm-up

Interval = tuple[float, float]


def steady_steps(steps: Iterable[int]) -> list[int]:
    """Return all step numbers except the first 10 (in a short run, except the first half)."""
    # In a run with fewer than 20 steps, only the first half is omitted, so that some steps remain.
    ordered = sorted(set(steps))
    return ordered[min(WARM_UP_STEPS, len(ordered) // 2) :]


def timeline_of(run: Run) -> pandas.DataFrame:
    """Return the timeline of a run, or of its first seed that has a timeline.

    Raises:
        LabkitError: If neither the run nor any of its seeds has a timeline of gradient exchanges.
    """
    for candidate in (run, *run.seeds):
        if (candidate.timeline["kind"] == "communicate").any():
            return candidate.timeline
    raise LabkitError(
        f"{run.name} has no timeline of an exchange (state: {run.status['state']}); a completed "
        "run on two or more workers that exchange gradients has one"
    )


def step_seconds(timeline: pandas.DataFrame) -> pandas.Series[float]:
    """Return, by step number, the seconds that a step takes on its slowest rank."""
    steps = timeline[timeline["kind"] == "step"]
    seconds: pandas.Series[float] = (steps["stop"] - steps["start"]).groupby(steps["step"]).max()
    return seconds


def typical_steps(timeline: pandas.DataFrame, count: int) -> list[int]:
    """Return `count` consecutive steps whose total duration is the median (typical)."""
    steps = timeline[timeline["kind"] == "step"].groupby("step")
    starts, stops = steps["start"].min(), steps["stop"].max()
    numbers = steady_steps(starts.index)
    rows = [numbers[start : start + count] for start in range(max(len(numbers) - count + 1, 1))]
    durations = [float(stops[row[-1]] - starts[row[0]]) for row in rows]
    # A group of steps with an evaluation in between is among the longest groups, so it is not the
    # median.
    return rows[int(np.argsort(durations)[len(durations) // 2])]


def activities(timeline: pandas.DataFrame, steps: Sequence[int]) -> pandas.DataFrame:
    """Return all ranks' activities in `steps`, timed from the start of the first of the steps.

    The returned table has the same columns as a timeline. The returned table also has rows of kind
    "compute", which cover the time of a step except for packing and waiting.

    Raises:
        InvalidInput: If the timeline contains none of the steps in `steps`.
    """
    import pandas as pd

    step_events = timeline[timeline["kind"] == "step"]
    chosen = step_events[step_events["step"].isin(steps)]
    if chosen.empty:
        recorded = step_events["step"]
        raise InvalidInput(
            f"none of steps {steps} is recorded; the timeline has steps {recorded.min()} to "
            f"{recorded.max()}"
        )
    begin, end = chosen["start"].min(), chosen["stop"].max()
    # Events are selected by time, because ranks may still exchange a bucket of the previous step.
    events = timeline[(timeline["stop"] > begin) & (timeline["start"] < end)]
    # Communication events are not selected by step number, because the communication thread may
    # record the number of the previous or next step.
    events = events[(events["kind"] == "communicate") | events["step"].isin(steps)]
    events = events.assign(start=events["start"] - begin, stop=events["stop"] - begin)
    computed = [
        (rank, "compute", step, -1, start, stop)
        for rank, rows in events.groupby("rank")
        for step, start, stop in _computations(rows)
    ]
    columns = ["rank", "kind", "step", "bucket", "start", "stop"]
    return pd.concat([events[columns], pd.DataFrame(computed, columns=columns)], ignore_index=True)


def _computations(rows: pandas.DataFrame) -> Iterable[tuple[int, float, float]]:
    """Yield (step, start, stop) of each interval in which a rank neither packs nor waits."""
    other = rows[rows["kind"].isin(["pack", "wait"])]
    others = sorted(zip(other["start"], other["stop"], strict=True))
    steps = rows[rows["kind"] == "step"]
    for step, *whole in zip(steps["step"], steps["start"], steps["stop"], strict=True):
        for start, stop in _subtract((whole[0], whole[1]), others):
            yield step, start, stop


def _subtract(whole: Interval, others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of an interval that are in none of the sorted intervals `others`."""
    position, end = whole
    parts = []
    for start, stop in others:
        # The other intervals may overlap one another, and may start or end outside of `whole`.
        if start > position and position < end:
            parts.append((position, min(start, end)))
        position = max(position, stop)
    if position < end:
        parts.append((position, end))
    return parts
