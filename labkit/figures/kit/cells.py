"""The cell mark: a picture of cells, coloured by their values."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from labkit.figures.kit.entries import INK
from labkit.figures.kit.panels import Trace

Scale = list[tuple[float, str]]  # from 0, the least value, to 1, the most: colours


def cells(
    values: ArrayLike,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
    colors: Scale | None = None,
    most: float | None = None,
    hover: str = "",
    gap: float = 0,
    texts: Sequence[Sequence[str]] = (),
    letters: int = 12,
    on: Trace | None = None,
) -> Trace:
    """Cells of a table with a row and a column for each name, or between these edges.

    Args:
        values: shape (rows, columns); x, y: names, or edges, of columns and rows; None: numbers.
        colors: from the least value, 0, to `most`; None: those of the figure's own colour axis.
        hover: in Plotly's words; "": nothing is said.
        texts: what stands in the cells, in so large letters.
        gap: pixels between cells; on: the axes, where they are not the first ones.
    """
    scale: Trace = {"coloraxis": "coloraxis"}
    if colors is not None:
        scale = {"colorscale": colors, "zmin": 0, "zmax": most, "showscale": False}
    said: Trace = {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    place = {name: edges for name, edges in (("x", x), ("y", y)) if edges is not None}
    between = {"xgap": gap, "ygap": gap}
    text: Trace = {"text": texts, "texttemplate": "%{text}"} if texts else {}
    text |= {"textfont": {"color": INK, "size": letters}} if texts else {}
    return {"type": "heatmap", "z": values} | place | scale | said | between | text | (on or {})


def towards(color: str, alpha: float = 1.0) -> Scale:
    """Colours from clear to this one ("213,94,0"), at an opacity on which text stays legible."""
    # Clear at the low end, so that the page's own colour shows: light or dark.
    return [(0, f"rgba({color},0)"), (1, f"rgba({color},{alpha})")]


def in_steps(colors: Sequence[str]) -> Scale:
    """A colour for each of the values 0, 1, 2, …: from half a step below to half a step above."""
    last = len(colors) - 1
    return [
        (min(max((step + side) / last, 0.0), 1.0), color)
        for step, color in enumerate(colors)
        for side in (-0.5, 0.5)
    ]
