"""The Gantt of a run's exchange: when which rank computed, packed, waited and communicated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.exchange.overlap import overlaps
from labkit.figures.exchange.hidden import steady, step_seconds, timeline_of
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import INK, Entry, Line, clock_and_network, safe_text
from labkit.figures.kit.panels import Panel, lanes_axis
from labkit.figures.runs.speed import refused
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

SHOWN = 3  # steps, where none are named
MOST_RANKS = 8  # of more, the first are drawn
LANE = 24  # pixels a lane
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
KINDS = {
    "compute": ("compute", "#56B4E9"),
    "pack": ("pack a bucket", "#009E73"),
    "wait": ("wait for a bucket", "#E69F00"),
    "communicate": ("communicate a bucket", "#0072B2"),
}

Interval = tuple[float, float]


@dataclass(frozen=True)
class _Window:
    """The events of one run that are drawn; ms from the begin of its first step shown."""

    entry: Entry
    steps: list[int]
    events: pandas.DataFrame
    end: float

    @property
    def words(self) -> str:
        """`steps 20 to 22: 17.3, 17.9, 18.1 ms`"""
        seconds = 1e3 * step_seconds(self.events)
        named = f"steps {self.steps[0]} to {self.steps[-1]}"
        if len(self.steps) == 1:
            named = f"step {self.steps[0]}"
        return f"{named}: {', '.join(f'{value:.3g}' for value in seconds)} ms"


def timeline(runs: Iterable[Run] | Run, steps: Iterable[int] | None = None) -> Figure:
    """A Gantt a run, one under the other on the same scale of time: two lanes for each rank.

    training: compute (what of a step is neither packing nor waiting), pack, wait; communication:
    the rank's communication thread, bucket by bucket. All ranks are on one clock, that of the host.

    Args:
        runs: one or several.
        steps: which to draw; default: three in a row that take as long as is usual, without the
            first 10.

    Raises:
        LabkitError: a run has no timeline. InvalidInput: it has none of these steps.
    """
    from labkit.figures.kit.canvas import draw

    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    wanted = None if steps is None else sorted(set(steps))
    drawn = {e.key: _window(e, wanted) for e in shown if not e.gate_failed}
    end = max((window.end for window in drawn.values()), default=1.0)
    ranks = max((window.events["rank"].nunique() for window in drawn.values()), default=1)
    panels = [_panel(entry, drawn.get(entry.key), end) for entry in shown]
    title = f"Timeline, {ranks} ranks · {clock_and_network(shown)}"
    remark = f"the first {MOST_RANKS} ranks" if ranks > MOST_RANKS else ""
    words = [f"{e.label}: {_in_words(e, drawn.get(e.key))}" for e in shown]
    lines = [Line(name, color, "solid", "square") for name, color in KINDS.values()]
    height = LANE * 2 * min(ranks, MOST_RANKS)
    alt = ". ".join([title, *words]) + "."
    figure = draw([[panel] for panel in panels], lines, title, remark, alt, height)
    figure.update_layout(barmode="overlay", bargap=0.12, margin={"l": 150})
    return figure


def _window(entry: Entry, wanted: list[int] | None) -> _Window:
    """The events that touch these steps."""
    events = timeline_of(entry.run)
    chosen = _usual(events) if wanted is None else wanted
    own = events[(events["kind"] == "step") & events["step"].isin(chosen)]
    if own.empty:
        has = events[events["kind"] == "step"]["step"]
        raise InvalidInput(
            f"{entry.label} has none of steps {chosen}; its timeline has {has.min()} to {has.max()}"
        )
    begin, end = own["start"].min(), own["stop"].max()
    events = events[(events["stop"] > begin) & (events["start"] < end)]
    # The communication thread may be a step ahead or behind.
    events = events[(events["kind"] == "communicate") | events["step"].isin(chosen)]
    moved = events.assign(start=events["start"] - begin, stop=events["stop"] - begin)
    return _Window(entry, sorted(own["step"].unique().tolist()), moved, 1e3 * (end - begin))


def _usual(events: pandas.DataFrame) -> list[int]:
    """Steady steps in a row that together last as long as is usual: none with an epoch's end."""
    steps = events[events["kind"] == "step"].groupby("step")
    begins, ends = steps["start"].min(), steps["stop"].max()
    numbers = steady(begins.index)
    rows = [numbers[place : place + SHOWN] for place in range(max(len(numbers) - SHOWN + 1, 1))]
    lasts = [float(ends[row[-1]] - begins[row[0]]) for row in rows]
    return rows[int(np.argsort(lasts)[len(lasts) // 2])]


def _panel(entry: Entry, window: _Window | None, end: float) -> Panel:
    if window is None:
        return Panel(entry.label, "", "", [], refused(entry))
    ranks = sorted(window.events["rank"].unique())[:MOST_RANKS]
    lanes = [name for rank in ranks for name in _lanes(rank)]
    return Panel(
        title=f"{entry.label}\n{window.words}",
        x="time, ms",
        y="",
        traces=[_begins(window, ranks), *(_bars(window, ranks, kind) for kind in KINDS)],
        x_axis={"range": [-0.01 * end, 1.01 * end]},
        y_axis=lanes_axis(lanes),
        link="time",
    )


def _lanes(rank: int) -> tuple[str, str]:
    return f"rank {rank} training", f"rank {rank} communication"


def _bars(window: _Window, ranks: list[int], kind: str) -> dict[str, Any]:
    """One bar an event of this kind, in the lanes of these ranks."""
    name, color = KINDS[kind]
    lane = 1 if kind == "communicate" else 0
    found = [
        (_lanes(rank)[lane], step, bucket, 1e3 * start, 1e3 * (stop - start))
        for rank in ranks
        for step, bucket, start, stop in _events(window.events, rank, kind)
    ]
    lanes, steps, buckets, starts, lengths = zip(*found, strict=True) if found else [()] * 5
    what = "compute" if kind == "compute" else f"{kind} bucket %{{customdata[1]:.0f}}"
    return {
        "type": "bar",
        "orientation": "h",
        "x": lengths,
        "base": starts,
        "y": lanes,
        "customdata": list(zip(steps, buckets, starts, strict=True)),
        "text": [str(bucket) for bucket in buckets] if kind == "communicate" else None,
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "marker": {"color": color, "line": {"color": "white", "width": 0.5}},
        "hovertemplate": f"{what}, step %{{customdata[0]}}<br>%{{customdata[2]:.2f}} ms, "
        "for %{x:.3f} ms<extra>%{y}</extra>",
        "legendgroup": name,
        "name": safe_text(name),
        "showlegend": False,
    }


def _begins(window: _Window, ranks: list[int]) -> dict[str, Any]:
    """A mark where a step begins."""
    own = window.events[(window.events["kind"] == "step") & window.events["rank"].isin(ranks)]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": 1e3 * own["start"],
        "y": [_lanes(rank)[0] for rank in own["rank"]],
        "customdata": own["step"],
        "marker": {"symbol": "line-ns", "size": LANE, "line": {"color": INK, "width": 2}},
        "hovertemplate": "step %{customdata} begins<extra>%{y}</extra>",
        "showlegend": False,
    }


def _events(events: pandas.DataFrame, rank: int, kind: str) -> list[tuple[int, int, float, float]]:
    """(step, bucket, start, stop) of a rank's events; computation is what is left of its steps."""
    own = events[events["rank"] == rank]
    if kind != "compute":
        rows = own[own["kind"] == kind]
        return list(zip(rows["step"], rows["bucket"], rows["start"], rows["stop"], strict=True))
    other = own[own["kind"].isin(["pack", "wait"])]
    taken = sorted(zip(other["start"], other["stop"], strict=True))
    steps = own[own["kind"] == "step"]
    return [
        (step, -1, start, stop)
        for step, whole in zip(
            steps["step"], zip(steps["start"], steps["stop"], strict=True), strict=True
        )
        for start, stop in _without(whole, taken)
    ]


def _without(whole: Interval, taken: list[Interval]) -> list[Interval]:
    """What of an interval is in none of the others, which are sorted."""
    left, end = whole
    found = []
    for start, stop in taken:
        if start > left and left < end:
            found.append((left, min(start, end)))
        left = max(left, stop)
    if left < end:
        found.append((left, end))
    return found


def _in_words(entry: Entry, window: _Window | None) -> str:
    if window is None:
        return refused(entry)
    kept = [each for each in overlaps(timeline_of(entry.run)) if each.step in window.steps]
    communication, exposed = (
        1e3 * sum(getattr(each, name) for each in kept) / max(len(kept), 1)
        for name in ("communication", "exposed")
    )
    return (
        f"{window.words}; communication takes {communication:.3g} ms a step, and training waits "
        f"{exposed:.3g} ms"
    )
