"""From panels to a figure: its title, remarks, legend and words, the same way for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import OVERSUBSCRIBED, Entry, Line
from labkit.figures.kit.panels import BELOW, PLOT, Panel

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure


def sheet(
    rows: Sequence[Sequence[Panel]],
    shown: Iterable[Entry | Line],
    title: str,
    remarks: Sequence[str] = (),
    words: Sequence[str] = (),
    plot: int = PLOT,
    below: int = BELOW,
) -> Figure:
    """Rows of panels as one figure, with its title, remarks and one legend.

    Args:
        rows: of panels, from above.
        shown: who is in the legend.
        title: with clock and network, where it has times.
        remarks: what a reader must know of all panels; they stand under the title.
        words: what the panels show, in words, for those who hear them.
        plot, below: pixels from the top of a panel's axes to their bottom, and of the labels
            under it.
    """
    # Plotly takes half a second to import, which `lk.table` and `labkit ls` need not wait for.
    from labkit.figures.kit.canvas import draw

    said = [part for part in remarks if part]
    # What is seen and what is heard are made of the same words.
    alt = ". ".join(part for part in (title, *said, *words) if part) + "."
    return draw(rows, list(shown), title, " · ".join(said), alt, plot, below)


def busy(shown: Iterable[Entry]) -> list[str]:
    """The remark that a run had more threads than cores; none where all had cores enough."""
    return [OVERSUBSCRIBED] if any(e.metrics.get("oversubscribed") for e in shown) else []
