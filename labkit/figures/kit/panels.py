"""Panels as data: the traces, axes and texts of one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# A `Trace` is a Plotly dictionary that describes a trace, an axis or a layout. Plotly's schema
# validates a `Trace` when the figure is drawn.
Trace: TypeAlias = dict[str, Any]

PLOT, BELOW = 200, 50  # heights in pixels: a panel's axes, and the labels below the axes


@dataclass(frozen=True)
class Panel:
    """The traces, axes and texts of one chart in a figure.

    Attributes:
        title: Title; the first line is bold.
        x, y: Axis titles with units.
        traces: Plotly traces; they do not contain names of axes.
        note: Text in the middle of a panel without traces; if `always_note` is true, text below the
            axis of any panel.
        always_note: Whether the note is also shown in a panel that has traces.
        x_axis, y_axis: Further Plotly settings of the axes.
        link: A key: if the user zooms the x axis of one panel, the x axes of all panels with the
            same key follow.
        over: Alternative x axes by name; the `meta` of a trace contains its positions on these
            axes.
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
