"""A sheet: the panels of a figure, drawn when it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import MANY, OVERSUBSCRIBED, LineStyle, RunEntry
from labkit.figures.kit.panels import BELOW, PLOT, Panel

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure


@dataclass(frozen=True)
class Sheet:
    """Rows of panels, shown as one figure, or one after another on a report page.

    Attributes:
        rows: Rows of panels, from top to bottom.
        shown: Entries of the legend.
        title: Title of the sheet, which includes the clock and the network if the figure shows
            times.
        remarks: Remarks on all panels, which form the subtitle.
        words: Descriptions of what the panels show, for the alternative text.
        plot: Height of the axes of a panel in pixels.
        below: Height of the labels under the axes in pixels.
    """

    rows: Sequence[Sequence[Panel]]
    shown: Sequence[RunEntry | LineStyle]
    title: str
    remarks: Sequence[str] = ()
    words: Sequence[str] = ()
    plot: int = PLOT
    below: int = BELOW

    @property
    def remark(self) -> str:
        """The subtitle, which contains all remarks in one line."""
        return " · ".join(part for part in self.remarks if part)

    @property
    def alt(self) -> str:
        """The alternative text: title, remarks, and at most `MANY` of the texts in `words`."""
        more = len(self.words) - MANY
        rest = (f"and {more} more texts, which the table contains",) if more > 0 else ()
        parts = (self.title, *self.remarks, *self.words[:MANY], *rest)
        return ". ".join(part for part in parts if part) + "."

    def figure(self) -> Figure:
        """Draw all panels as one figure, with a legend."""
        # Plotly is imported only here, because the import takes half a second. `lk.table` and
        # `labkit ls` work without Plotly.
        from labkit.figures.kit.canvas import draw

        shown = list(self.shown)
        return draw(self.rows, shown, self.title, self.remark, self.alt, self.plot, self.below)


def sheet(
    rows: Sequence[Sequence[Panel]],
    entries: Iterable[RunEntry | LineStyle],
    title: str,
    remarks: Sequence[str] = (),
    words: Sequence[str] = (),
    plot: int = PLOT,
    below: int = BELOW,
) -> Figure:
    """Draw rows of panels as one figure; the arguments are described in `Sheet`."""
    return Sheet(rows, list(entries), title, remarks, words, plot, below).figure()


def overload(entries: Iterable[RunEntry]) -> list[str]:
    """Return a remark if a run used more threads than the host has cores."""
    return [OVERSUBSCRIBED] if any(e.metrics.get("oversubscribed") for e in entries) else []
