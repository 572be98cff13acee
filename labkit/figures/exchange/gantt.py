"""The Gantt of a run's exchange: when which rank computed, packed, waited and communicated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.figures.kit.entries import INK, Entry, clock_and_network, entries
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.sheet import Trace
from labkit.figures.runs.speed import refused
from labkit.records.overlap import overlaps
from labkit.records.run import Run
from labkit.records.timed_steps import activities, step_seconds, timeline_of, usual

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

SHOWN = 3  # steps, where none are named
MOST_RANKS = 8  # of more, the first are drawn
LANE = 24  # pixels a lane
STEP = ", step %{customdata[0]}"
# Okabe and Ito (2008), as in `entries`: told apart with any colour vision.
KINDS = {"compute": Kind("compute", "#56B4E9", f"compute{STEP}")} | {
    kind: Kind(f"{kind}{what}", color, f"{kind} bucket %{{customdata[1]}}{STEP}")
    for kind, what, color in (
        ("pack", " a bucket", "#009E73"),
        ("wait", " for a bucket", "#E69F00"),
        ("communicate", " a bucket", "#0072B2"),
    )
}


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
    shown = entries(runs)
    wanted = None if steps is None else sorted(set(steps))
    drawn = {e.key: _activities(e, wanted) for e in shown if not e.gate_failed}
    # One scale for all runs, so that a shorter step looks shorter.
    ends = [rows[rows["kind"] == "step"]["stop"].max() for rows in drawn.values()]
    ranks = max((rows["rank"].nunique() for rows in drawn.values()), default=1)
    panels, words = [], []
    for entry in shown:
        if entry.gate_failed:
            panels.append(Lanes(entry.label, note=refused(entry)))
            words.append(f"{entry.label}: {refused(entry)}")
        else:
            said = _durations(drawn[entry.key])
            panels.append(_panel(f"{entry.label}\n{said}", drawn[entry.key]))
            words.append(f"{entry.label}: {said}; {_waits(entry, drawn[entry.key])}")
    title = f"Timeline, {ranks} ranks · {clock_and_network(shown)}"
    remark = f"the first {MOST_RANKS} ranks" if ranks > MOST_RANKS else ""
    return lanes(panels, KINDS, title, remark, words, LANE, 1e3 * max(ends, default=1e-3))


def _activities(entry: Entry, wanted: Sequence[int] | None) -> pandas.DataFrame:
    events = timeline_of(entry.run)
    try:
        return activities(events, usual(events, SHOWN) if wanted is None else wanted)
    except InvalidInput as error:
        raise InvalidInput(f"{entry.label} has {error}") from error


def _panel(title: str, rows: pandas.DataFrame) -> Lanes:
    ranks = sorted(rows["rank"].unique())[:MOST_RANKS]
    rows = rows[rows["rank"].isin(ranks)]
    # The communication thread works beside training: on one lane its bars would cover the others.
    served = rows["kind"] == "communicate"
    ways = served.map({True: "communication", False: "training"})
    bars = rows.assign(
        lane=[f"rank {rank} {way}" for rank, way in zip(rows["rank"], ways, strict=True)],
        start=1e3 * rows["start"],
        length=1e3 * (rows["stop"] - rows["start"]),
        text=rows["bucket"].map("{:.0f}".format).where(served, ""),
    )
    order = [f"rank {rank} {way}" for rank in ranks for way in ("training", "communication")]
    # A step holds all of its parts: as a bar it would lie over them.
    steps = bars["kind"] == "step"
    details, below = ("step", "bucket"), [_begins(bars[steps])]
    return Lanes(title, order, bars[~steps], details, below)


def _begins(steps: pandas.DataFrame) -> Trace:
    """A mark where a step begins."""
    return {
        "mode": "markers",
        "x": steps["start"],
        "y": steps["lane"],
        "customdata": steps["step"],
        "marker": {"symbol": "line-ns", "size": LANE, "line": {"color": INK, "width": 2}},
        "hovertemplate": "step %{customdata} begins<extra>%{y}</extra>",
        "showlegend": False,
    }


def _durations(rows: pandas.DataFrame) -> str:
    """`steps 20 to 22: 17.3, 17.9, 18.1 ms`"""
    seconds = 1e3 * step_seconds(rows)
    first, last = seconds.index.min(), seconds.index.max()
    named = f"step {first}" if first == last else f"steps {first} to {last}"
    return f"{named}: {', '.join(f'{value:.3g}' for value in seconds)} ms"


def _waits(entry: Entry, rows: pandas.DataFrame) -> str:
    steps = set(rows[rows["kind"] == "step"]["step"])
    kept = [each for each in overlaps(timeline_of(entry.run)) if each.step in steps]
    many = max(len(kept), 1) / 1e3
    communication = sum(each.communication for each in kept) / many
    exposed = sum(each.exposed for each in kept) / many
    return f"communication takes {communication:.3g} ms a step, and training waits {exposed:.3g} ms"
