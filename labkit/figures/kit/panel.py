"""One small chart as data, so that it can stand alone or beside others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Panel:
    """Traces, axes and words of a chart.

    title: the first line in bold, further lines below it; x, y: the axes' titles, with units;
    note: stands in the middle where there are no traces, else below the x axis where
    `always_note`; link: panels with the same one share their x axis when zoomed.
    """

    title: str
    x: str
    y: str
    traces: list[dict[str, Any]]
    note: str = ""
    always_note: bool = False
    x_axis: dict[str, Any] = field(default_factory=dict)
    y_axis: dict[str, Any] = field(default_factory=dict)
    link: str = ""


def lanes_axis(lanes: Sequence[str]) -> dict[str, Any]:
    """A y axis with a lane for each name, the first on top."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(lanes[::-1]),
        "range": [-0.5, len(lanes) - 0.5],
        "showgrid": False,
        "nticks": len(lanes),
    }
