"""The steps of a run by its timeline: which are steady, how long each took, who did what when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

WARM = 10  # steps at the begin that count as warm-up

Interval = tuple[float, float]


def steady(steps: Iterable[int]) -> list[int]:
    """Steps without the first 10; of a short run, without its first half."""
    # Of a short run half: ten would leave nothing.
    ordered = sorted(set(steps))
    return ordered[min(WARM, len(ordered) // 2) :]


def timeline_of(run: Run) -> pandas.DataFrame:
    """A run's timeline, that of its first seed where it has repeats; raises LabkitError."""
    for each in (run, *run.seeds):
        if (each.timeline["kind"] == "communicate").any():
            return each.timeline
    raise LabkitError(
        f"{run.name} has no timeline of an exchange (state: {run.status['state']}); a completed "
        "run on two or more workers that exchange gradients has one"
    )


def step_seconds(timeline: pandas.DataFrame) -> pandas.Series[float]:
    """Seconds of each step, by its number: the slowest rank's."""
    steps = timeline[timeline["kind"] == "step"]
    seconds: pandas.Series[float] = (steps["stop"] - steps["start"]).groupby(steps["step"]).max()
    return seconds


def usual(timeline: pandas.DataFrame, many: int) -> list[int]:
    """Steady steps in a row that together last as long as is usual: none with an epoch's end."""
    steps = timeline[timeline["kind"] == "step"].groupby("step")
    begins, ends = steps["start"].min(), steps["stop"].max()
    numbers = steady(begins.index)
    rows = [numbers[place : place + many] for place in range(max(len(numbers) - many + 1, 1))]
    lasts = [float(ends[row[-1]] - begins[row[0]]) for row in rows]
    # The median row: one with an epoch's end, where ranks evaluate, is among the longest.
    return rows[int(np.argsort(lasts)[len(lasts) // 2])]


def activities(timeline: pandas.DataFrame, steps: Sequence[int]) -> pandas.DataFrame:
    """What each rank did in these steps, from the begin of the first one.

    Rows as in a timeline; of kind "compute" is what of a step is neither packing nor waiting.

    Raises: InvalidInput, where the timeline has none of these steps.
    """
    import pandas as pd

    every = timeline[timeline["kind"] == "step"]
    own = every[every["step"].isin(steps)]
    if own.empty:
        has = every["step"]
        raise InvalidInput(f"none of steps {steps}; its timeline has {has.min()} to {has.max()}")
    begin, end = own["start"].min(), own["stop"].max()
    # By time, not by step: a bucket of the step before may still be on its way.
    events = timeline[(timeline["stop"] > begin) & (timeline["start"] < end)]
    # The communication thread may be a step ahead or behind.
    events = events[(events["kind"] == "communicate") | events["step"].isin(steps)]
    events = events.assign(start=events["start"] - begin, stop=events["stop"] - begin)
    computed = [
        (rank, "compute", step, -1, start, stop)
        for rank, rows in events.groupby("rank")
        for step, start, stop in _computed(rows)
    ]
    columns = ["rank", "kind", "step", "bucket", "start", "stop"]
    return pd.concat([events[columns], pd.DataFrame(computed, columns=columns)], ignore_index=True)


def _computed(rows: pandas.DataFrame) -> Iterable[tuple[int, float, float]]:
    """(step, start, stop) of a rank's computation: what is left of its steps."""
    other = rows[rows["kind"].isin(["pack", "wait"])]
    taken = sorted(zip(other["start"], other["stop"], strict=True))
    steps = rows[rows["kind"] == "step"]
    for step, *whole in zip(steps["step"], steps["start"], steps["stop"], strict=True):
        for start, stop in _without((whole[0], whole[1]), taken):
            yield step, start, stop


def _without(whole: Interval, taken: Iterable[Interval]) -> list[Interval]:
    """What of an interval is in none of the others, which are sorted."""
    left, end = whole
    found = []
    for start, stop in taken:
        # Intervals may overlap, and reach beyond the whole.
        if start > left and left < end:
            found.append((left, min(start, end)))
        left = max(left, stop)
    if left < end:
        found.append((left, end))
    return found
