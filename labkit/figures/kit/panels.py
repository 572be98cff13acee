"""Charts as data, each alone or beside others, and the sheet on which they are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.figures.kit.entries import OVERSUBSCRIBED, Entry, Line

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
    `always_note`; link: panels with the same one share their x axis when zoomed.
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
    alt = ". ".join(part for part in (title, *said, *words) if part) + "."
    return draw(rows, list(shown), title, " · ".join(said), alt, plot, below)


def busy(shown: Iterable[Entry]) -> list[str]:
    """The remark that a run had more threads than cores; none where all had cores enough."""
    return [OVERSUBSCRIBED] if any(e.metrics.get("oversubscribed") for e in shown) else []


def lanes_axis(lanes: Sequence[str]) -> Trace:
    """A y axis with a lane for each name, the first on top."""
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": list(lanes[::-1]),
        "range": [-0.5, len(lanes) - 0.5],
        "showgrid": False,
        "nticks": len(lanes),
    }
