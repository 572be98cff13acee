"""Panels as data, and sheets of panels with a title, a legend and alternative text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.figures.kit.entries import MANY, OVERSUBSCRIBED, Entry, Line

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

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


@dataclass(frozen=True)
class Sheet:
    """Rows of panels, to be laid out as one figure, or one by one on a page.

    Attributes:
        rows: of panels, from above.
        shown: entries of the legend.
        title: with clock and network, where it has times.
        remarks: on all panels; they stand under the title.
        words: the panels as text, for the alternative text.
        plot, below: pixels from the top of a panel's axes to their bottom, and of the labels
            under it.
    """

    rows: Sequence[Sequence[Panel]]
    shown: Sequence[Entry | Line]
    title: str
    remarks: Sequence[str] = ()
    words: Sequence[str] = ()
    plot: int = PLOT
    below: int = BELOW

    @property
    def remark(self) -> str:
        """The line under the title."""
        return " · ".join(part for part in self.remarks if part)

    @property
    def alt(self) -> str:
        """The alternative text, of at most `MANY` sentences about runs."""
        more = len(self.words) - MANY
        rest = (f"and {more} more, which a table has",) if more > 0 else ()
        parts = (self.title, *self.remarks, *self.words[:MANY], *rest)
        return ". ".join(part for part in parts if part) + "."

    def figure(self) -> Figure:
        """Draw all panels on one canvas, with a legend."""
        # Plotly takes half a second to import, which `lk.table` and `labkit ls` need not wait for.
        from labkit.figures.kit.canvas import draw

        shown = list(self.shown)
        return draw(self.rows, shown, self.title, self.remark, self.alt, self.plot, self.below)


def sheet(
    rows: Sequence[Sequence[Panel]],
    shown: Iterable[Entry | Line],
    title: str,
    remarks: Sequence[str] = (),
    words: Sequence[str] = (),
    plot: int = PLOT,
    below: int = BELOW,
) -> Figure:
    """Draw rows of panels as one figure, see `Sheet`."""
    return Sheet(rows, list(shown), title, remarks, words, plot, below).figure()


def overload(shown: Iterable[Entry]) -> list[str]:
    """Return the remark on more threads than cores, if a run had them."""
    return [OVERSUBSCRIBED] if any(e.metrics.get("oversubscribed") for e in shown) else []
