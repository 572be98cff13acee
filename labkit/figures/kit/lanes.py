"""Gantt charts: bars on a shared time axis, with a lane for each rank, device or stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from labkit.figures.kit.entries import LineStyle, safe_text
from labkit.figures.kit.panels import Panel, Trace, lanes_axis
from labkit.figures.kit.sheet import sheet

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure


class BarKind(NamedTuple):
    """A kind of bars in a Gantt chart: legend name, colour and hover text.

    The hover text is a Plotly template; `%{customdata[0]}` is the first column in
    `GanttPanel.details`.
    """

    name: str
    color: str
    hover: str = ""


@dataclass(frozen=True)
class GanttPanel:
    """One panel of a Gantt chart, with its lanes and bars.

    Attributes:
        title: Title of the panel; lines after the first are smaller.
        order: Names of the lanes, from top to bottom.
        bars: Table with a row per bar, or None for a panel without bars. The columns are lane,
            kind, start and length (ms), text (in the bar), and optionally opacity.
        details: Names of further columns of `bars`, which the hover text shows.
        below: Traces that are drawn below the bars, such as messages between lanes.
        note: Text of a panel without bars, such as the reason why there are none.
    """

    title: str
    order: Sequence[str] = ()
    bars: pandas.DataFrame | None = None
    details: Sequence[str] = ()
    below: Sequence[Trace] = field(default_factory=list)
    note: str = ""


def lanes(
    panels: Sequence[GanttPanel],
    kinds: Mapping[str, BarKind],
    title: str,
    remark: str,
    words: Sequence[str],
    lane: int,
    end: float,
    more: Sequence[BarKind] = (),
) -> Figure:
    """Draw Gantt charts one below the other, with the same time scale.

    Args:
        panels: Panels from top to bottom.
        kinds: The kinds of bars; the keys are the values in the column `kind`.
        title, remark, words: Title, subtitle and alternative text, the same as in `Sheet`.
        lane: Height of a lane in pixels.
        end: End of the time axis in ms.
        more: Further legend entries, for example for lines that show messages.
    """
    present = {kind for panel in panels if panel.bars is not None for kind in panel.bars["kind"]}
    legend = [*(kinds[kind] for kind in kinds if kind in present), *more]
    figure = sheet(
        [[_panel(panel, kinds, end)] for panel in panels],
        [LineStyle(kind.name, kind.color, "solid", "square") for kind in legend],
        title,
        [remark],
        words,
        lane * max((len(panel.order) for panel in panels), default=1),
    )
    longest = max((len(name) for panel in panels for name in panel.order), default=0)
    # A fixed margin aligns the time axes of several figures, because Plotly's automatic margins
    # depend on the labels.
    room = {"l": 80 if longest < 12 else 150}
    figure.update_layout(barmode="overlay", bargap=0.12, margin=room)
    return figure


def connections(
    kind: BarKind, times: Sequence[tuple[float, float]], ends: Sequence[tuple[str, str]]
) -> Trace:
    """Return one trace of lines from (start in ms, sender's lane) to (stop, receiver's lane)."""
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


def _panel(panel: GanttPanel, kinds: Mapping[str, BarKind], end: float) -> Panel:
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


def _bars(rows: pandas.DataFrame, kind: BarKind, panel: GanttPanel) -> Trace:
    """Return all bars of one kind as one trace, so that a legend click hides all of them."""
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
