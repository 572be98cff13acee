"""Panels as data: traces, axes and texts of a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

# A trace, an axis or a layout, as Plotly takes it: its own schema checks it when it is drawn, and
# knows more of it than a type here could say.
Trace: TypeAlias = dict[str, Any]

PLOT, BELOW = 200, 50  # pixels of a panel's plot, and of the axis below it


@dataclass(frozen=True)
class Panel:
    """Traces, axes and words of a chart.

    title: the first line in bold, further lines below it; x, y: the axes' titles, with units;
    note: stands in the middle where there are no traces, else below the x axis where
    `always_note`; link: panels with the same one share their x axis when zoomed;
    over: the x axis over each of several things; traces have their places there in `meta`.
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
    """Return a y axis with a lane for each name, the first on top."""
    return {
        "type": "category",
        "categoryorder": "array",
        # Plotly counts categories from below.
        "categoryarray": list(lanes[::-1]),
        "range": [-0.5, len(lanes) - 0.5],
        "showgrid": False,
        "nticks": len(lanes),
    }
