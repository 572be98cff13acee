"""The steps of a run's timeline: steady steps, their durations, and the activities of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

WARM_UP_STEPS = 10  # number of steps at the start of a run that do not count as steady

Interval = tuple[float, float]


def steady_steps(steps: Iterable[int]) -> list[int]:
    """Return the steps without the first 10, or without the first half of a short run."""
    # A run of fewer than 20 steps loses only half of them, so that some steps remain.
    ordered = sorted(set(steps))
    return ordered[min(WARM_UP_STEPS, len(ordered) // 2) :]


def timeline_of(run: Run) -> pandas.DataFrame:
    """Return a run's timeline, or the timeline of its first seed that has one.

    Raises:
        LabkitError: Neither the run nor its seeds have a timeline of gradient exchanges.
    """
    for candidate in (run, *run.seeds):
        if (candidate.timeline["kind"] == "communicate").any():
            return candidate.timeline
    raise LabkitError(
        f"{run.name} has no timeline of an exchange (state: {run.status['state']}); a completed "
        "run on two or more workers that exchange gradients has one"
    )


def step_seconds(timeline: pandas.DataFrame) -> pandas.Series[float]:
    """Return the seconds of each step on the slowest rank, indexed by the number of the step."""
    steps = timeline[timeline["kind"] == "step"]
    seconds: pandas.Series[float] = (steps["stop"] - steps["start"]).groupby(steps["step"]).max()
    return seconds


def typical_steps(timeline: pandas.DataFrame, count: int) -> list[int]:
    """Return `count` consecutive steady steps whose total duration is the median of such groups."""
    steps = timeline[timeline["kind"] == "step"].groupby("step")
    starts, stops = steps["start"].min(), steps["stop"].max()
    numbers = steady_steps(starts.index)
    rows = [numbers[start : start + count] for start in range(max(len(numbers) - count + 1, 1))]
    durations = [float(stops[row[-1]] - starts[row[0]]) for row in rows]
    # Groups that contain an evaluation after an epoch are among the longest, not the median.
    return rows[int(np.argsort(durations)[len(durations) // 2])]


def activities(timeline: pandas.DataFrame, steps: Sequence[int]) -> pandas.DataFrame:
    """Return the activities of each rank in these steps; times count from the first step's start.

    The result has the columns of a timeline. Rows of kind "compute" are added: they cover the time
    of a step without packing and waiting.

    Raises:
        InvalidInput: The timeline has none of these steps.
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
    # Events are selected by time, because a bucket of the previous step may still be in transit.
    events = timeline[(timeline["stop"] > begin) & (timeline["start"] < end)]
    # The communication thread may record the number of the previous or the next step.
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
    """Yield (step, start, stop) of the intervals in which a rank neither packs nor waits."""
    other = rows[rows["kind"].isin(["pack", "wait"])]
    others = sorted(zip(other["start"], other["stop"], strict=True))
    steps = rows[rows["kind"] == "step"]
    for step, *whole in zip(steps["step"], steps["start"], steps["stop"], strict=True):
        for start, stop in _subtract((whole[0], whole[1]), others):
            yield step, start, stop


def _subtract(whole: Interval, others: Iterable[Interval]) -> list[Interval]:
    """Return the parts of an interval that lie outside all other intervals, which are sorted."""
    position, end = whole
    parts = []
    for start, stop in others:
        # The other intervals may overlap each other, and extend beyond the whole interval.
        if start > position and position < end:
            parts.append((position, min(start, end)))
        position = max(position, stop)
    if position < end:
        parts.append((position, end))
    return parts
