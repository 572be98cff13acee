"""Gantt charts: bars on one axis of time, a lane for each rank, device or stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from labkit.figures.kit.entries import Line, safe_text
from labkit.figures.kit.panels import Panel, Trace, lanes_axis
from labkit.figures.kit.sheet import sheet

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure


class Kind(NamedTuple):
    """A kind of bars: its name in the legend, its colour, and its hover text.

    hover: in Plotly's words; `%{customdata[0]}` is the first of the columns in `Lanes.details`.
    """

    name: str
    color: str
    hover: str = ""


@dataclass(frozen=True)
class Lanes:
    """A panel of a Gantt chart.

    Attributes:
        title: of the panel; further lines are smaller.
        order: names of the lanes, from top to bottom.
        bars: a row a bar: lane, kind, start and length (ms), text (in the bar), and opacity, where
            some are paler; None where nothing may be drawn.
        details: further columns, which hovering can name.
        below: traces that are drawn before the bars, such as messages between lanes.
        note: the text in place of bars.
    """

    title: str
    order: Sequence[str] = ()
    bars: pandas.DataFrame | None = None
    details: Sequence[str] = ()
    below: Sequence[Trace] = field(default_factory=list)
    note: str = ""


def lanes(
    panels: Sequence[Lanes],
    kinds: Mapping[str, Kind],
    title: str,
    remark: str,
    words: Sequence[str],
    lane: int,
    end: float,
    more: Sequence[Kind] = (),
) -> Figure:
    """Draw panels of lanes below each other, on the same scale of time.

    Args:
        panels: of the chart; kinds: of the bars, by the word in their column.
        title, remark, words: as for a sheet; lane: its height in pixels; end: of the axis, ms.
        more: further entries of the legend.
    """
    # Kinds without bars would make the legend longer than the figure needs.
    present = {kind for panel in panels if panel.bars is not None for kind in panel.bars["kind"]}
    legend = [*(kinds[kind] for kind in kinds if kind in present), *more]
    figure = sheet(
        [[_panel(panel, kinds, end)] for panel in panels],
        [Line(kind.name, kind.color, "solid", "square") for kind in legend],
        title,
        [remark],
        words,
        lane * max((len(panel.order) for panel in panels), default=1),
    )
    longest = max((len(name) for panel in panels for name in panel.order), default=0)
    # Plotly's own margin would differ from figure to figure, and times would not stand below each
    # other.
    room = {"l": 80 if longest < 12 else 150}
    figure.update_layout(barmode="overlay", bargap=0.12, margin=room)
    return figure


def connections(
    kind: Kind, times: Sequence[tuple[float, float]], ends: Sequence[tuple[str, str]]
) -> Trace:
    """Return lines between lanes: from start (ms) and sender to stop and receiver, as one trace."""
    return {
        "mode": "lines",
        "x": [time for pair in times for time in (*pair, None)],
        "y": [lane for pair in ends for lane in (*pair, None)],
        "line": {"color": kind.color, "width": 1},
        "opacity": 0.6,
        "hoverinfo": "skip",
        "legendgroup": kind.name,
        "name": safe_text(kind.name),
        "showlegend": False,
    }


def _panel(panel: Lanes, kinds: Mapping[str, Kind], end: float) -> Panel:
    if panel.bars is None:
        return Panel(panel.title, "", "", [], panel.note)
    groups = dict(list(panel.bars.groupby("kind", sort=False)))
    bars = [_bars(groups[name], kinds[name], panel) for name in kinds if name in groups]
    return Panel(
        title=panel.title,
        x="time, ms",
        y="",
        traces=[*panel.below, *bars],
        x_axis={"range": [-0.01 * end, 1.01 * end]},
        y_axis=lanes_axis(panel.order),
        link="time",
    )


def _bars(rows: pandas.DataFrame, kind: Kind, panel: Lanes) -> Trace:
    """Return all bars of one kind as one trace, so that the legend hides them together."""
    marker = {"color": kind.color, "line": {"color": "white", "width": 0.5}}
    if "opacity" in rows:
        marker["opacity"] = rows["opacity"].to_numpy()
    return {
        "type": "bar",
        "orientation": "h",
        "x": rows["length"].to_numpy(),
        "base": rows["start"].to_numpy(),
        "y": rows["lane"].tolist(),
        "customdata": rows[[*panel.details, "start"]].to_numpy(),
        "text": rows["text"].tolist(),
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "marker": marker,
        "hovertemplate": f"{kind.hover}<br>%{{customdata[{len(panel.details)}]:.3f}} ms, "
        "for %{x:.3f} ms<extra>%{y}</extra>",
        "legendgroup": kind.name,
        "name": safe_text(kind.name),
        "showlegend": False,
    }
