"""Sheets of panels with a title, a legend and alternative text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import MANY, OVERSUBSCRIBED, Entry, Line
from labkit.figures.kit.panels import BELOW, PLOT, Panel

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure


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
