"""Panels with what they share: title, remarks, legend and words, the same way for all."""

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
        shown: who is in the legend.
        title: with clock and network, where it has times.
        remarks: what a reader must know of all panels; they stand under the title.
        words: what the panels show, in words, for those who hear them.
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
        """What stands under the title."""
        return " · ".join(part for part in self.remarks if part)

    @property
    def alt(self) -> str:
        """What is seen and what is heard are made of the same words, those of so many at most."""
        more = len(self.words) - MANY
        rest = (f"and {more} more, which a table has",) if more > 0 else ()
        parts = (self.title, *self.remarks, *self.words[:MANY], *rest)
        return ". ".join(part for part in parts if part) + "."

    def figure(self) -> Figure:
        """All panels on one canvas, with a legend of their own."""
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
    """Rows of panels as one figure, see `Sheet`."""
    return Sheet(rows, list(shown), title, remarks, words, plot, below).figure()


def busy(shown: Iterable[Entry]) -> list[str]:
    """The remark that a run had more threads than cores; none where all had cores enough."""
    return [OVERSUBSCRIBED] if any(e.metrics.get("oversubscribed") for e in shown) else []
