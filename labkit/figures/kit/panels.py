"""Panels as data: traces, axes and texts of one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# A trace, an axis or a layout is a Plotly dictionary. Plotly's schema validates the dictionary when
# the figure is drawn.
Trace: TypeAlias = dict[str, Any]

PLOT, BELOW = 200, 50  # pixels: height of the axes of a panel, height of the labels below


@dataclass(frozen=True)
class Panel:
    """Traces, axes and texts of a chart.

    Attributes:
        title: Title; the first line is bold.
        x, y: Axis titles with units.
        traces: Plotly traces, without names of axes.
        note: Text in the middle of a panel without traces; with `always_note`, text below the axis.
        always_note: Whether a panel with traces shows the note, too.
        x_axis, y_axis: Further Plotly settings of the axes.
        link: Key; panels with the same key zoom their x axes together.
        over: Alternative x axes by name; the `meta` of a trace holds its positions on them.
    """

    title: str
    x: str
    y: str
    traces: list[Trace]
    note: str = ""
    always_note: bool = False
    x_axis: Trace = field(default_factory=dict)
    y_axis: Trace = field(default_factory=dict)
    link: str = ""
    over: dict[str, Trace] = field(default_factory=dict)


def lanes_axis(lanes: Sequence[str]) -> Trace:
    """Return a y axis with a lane for each name, from top to bottom."""
    return {
        "type": "category",
        "categoryorder": "array",
        # The order is reversed, because Plotly orders categories from bottom to top.
        "categoryarray": list(lanes[::-1]),
        "range": [-0.5, len(lanes) - 0.5],
        "showgrid": False,
        "nticks": len(lanes),
    }
