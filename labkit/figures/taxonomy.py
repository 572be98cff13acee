"""Taxonomy map: training methods by architecture, parallelism and synchronization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.common.units import plural
from labkit.figures.kit.entries import safe_text
from labkit.figures.kit.marks import Scale, cells, words
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import Sheet
from labkit.strategies import AXES, Cell

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

Row = tuple[str, str]  # (architecture, parallelism)
ROWS: Sequence[Row] = tuple(product(AXES["architecture"], AXES["parallelism"]))
COLUMNS: Sequence[str] = tuple(AXES["synchronization"])


class MethodInCell(NamedTuple):
    """A training method, its paper and notebooks, and its categories in the taxonomy.

    Attributes:
        method: Name of the method.
        paper: Author and year of the paper.
        notebooks: Names of the notebooks that run the method.
        cell: Category of the method on each axis of the taxonomy.
    """

    method: str
    paper: str
    notebooks: tuple[str, ...]
    cell: Cell

    @property
    def row(self) -> Row:
        """The architecture and the parallelism of the method."""
        return self.cell.architecture, self.cell.parallelism


def grid(
    standings: Iterable[MethodInCell],
) -> Mapping[tuple[Row, str], Mapping[str, list[MethodInCell]]]:
    """Group the methods by cell of the taxonomy map (row and column), and within a cell by name.

    The result also contains the empty cells of the taxonomy map. The cells of the result are
    ordered by row of the taxonomy map, then by column.
    """
    results: dict[tuple[Row, str], dict[str, list[MethodInCell]]] = {
        place: {} for place in product(ROWS, COLUMNS)
    }
    for standing in standings:
        cell_methods = results[standing.row, standing.cell.synchronization]
        cell_methods.setdefault(standing.method, []).append(standing)
    return results


def empty(standings: Iterable[MethodInCell]) -> list[str]:
    """List the empty cells, with one text per map row: `collective × data: asynchronous, …`."""
    empty_places = [place for place, methods in grid(standings).items() if not methods]
    texts = []
    for row, places in groupby(empty_places, key=lambda place: place[0]):
        columns = [column for _, column in places]
        what = "none at all" if len(columns) == len(COLUMNS) else ", ".join(columns)
        texts.append(f"{' × '.join(row)}: {what}")
    return texts


EMPTY = "—"
# The colour is the sky blue of Okabe and Ito (2008), pale enough for legible text. The second
# colour makes even a cell with a single method visible.
_COLORS: Scale = [
    (0, "rgba(86,180,233,0)"),
    (1e-6, "rgba(86,180,233,0.2)"),
    (1, "rgba(86,180,233,0.55)"),
]
# `_LINE` is the height of a method's name in pixels. `_ROOM` is the padding of a row in pixels.
# `_NUMBER` is the pixel height of a row with numbers only.
_LINE, _ROOM, _NUMBER = 15, 14, 34
_SHOWN = 5  # greatest number of notebooks that the hover text names

_CellMethods = Mapping[str, Sequence[MethodInCell]]


def taxonomy_map(standings: Iterable[MethodInCell], numbers: bool = False) -> Figure:
    """Draw methods by architecture and parallelism (rows) and synchronization (columns).

    The hover text of a cell lists the compression, scheduling, paper and notebooks of each method.
    A cell without a method has no colour and shows a dash.

    Args:
        standings: Methods, each with its categories in the taxonomy.
        numbers: Whether cells show the number of methods instead of their names, for example on a
            narrow screen.
    """
    shown = list(standings)
    cells_by_place = grid(shown)
    edges = _edges(cells_by_place, numbers)
    filled = [place for place, methods in cells_by_place.items() if methods]
    texts = [
        f"{' × '.join(place[0])}, {place[1]}: {', '.join(cells_by_place[place])}"
        for place in filled
    ]
    count = plural(len({standing.method for standing in shown}), "method")
    texts = [f"{count} in {len(filled)} of {plural(len(cells_by_place), 'cell')}", *texts]
    return Sheet(
        [[_panel(cells_by_place, edges, numbers)]],
        [],
        "Methods by architecture, parallelism and synchronization",
        words=[*texts, f"No method here: {'; '.join(empty(shown))}"],
        plot=int(edges[-1]),
        below=8,
    ).figure()


def title(row: Row, column: str) -> str:
    """Return the title of a table cell as text that is safe in Plotly."""
    return safe_text(f"{' × '.join(row)}, {column}")


def _edges(cells_by_place: Mapping[tuple[Row, str], _CellMethods], numbers: bool) -> np.ndarray:
    """Return the vertical pixel positions at which the rows of the map begin and end."""
    most = [max(len(cells_by_place[row, column]) for column in COLUMNS) for row in ROWS]
    heights = [_NUMBER if numbers else _LINE * max(2, count) + _ROOM for count in most]
    return np.cumsum([0, *heights])


def _panel(
    cells_by_place: Mapping[tuple[Row, str], _CellMethods], edges: np.ndarray, numbers: bool
) -> Panel:
    import pandas as pd

    shape = (len(ROWS), len(COLUMNS))
    counts = np.array([len(methods) for methods in cells_by_place.values()]).reshape(shape)
    hover = np.array([_hover(*place, methods) for place, methods in cells_by_place.items()])
    middles = (edges[:-1] + edges[1:]) / 2
    colors = cells(
        counts,
        x=np.arange(len(COLUMNS) + 1) - 0.5,
        y=edges,
        colors=_COLORS,
        most=int(counts.max(initial=1)),
        hover="%{customdata}",
        gap=2,
    )
    texts = [
        (str(len(methods)) if numbers else "<br>".join(map(safe_text, methods)))
        if methods
        else EMPTY
        for methods in cells_by_place.values()
    ]
    columns, rows = np.meshgrid(np.arange(len(COLUMNS)), middles)
    texts_table = pd.DataFrame({"x": columns.ravel(), "y": rows.ravel(), "text": texts})
    return Panel(
        title="",
        x="",
        y="",
        traces=[
            colors | {"customdata": hover.reshape(shape)},
            words(texts_table, "x", "y", size=12 if numbers else 11),
        ],
        x_axis={
            "tickvals": list(range(len(COLUMNS))),
            "ticktext": [_break_words(column, numbers) for column in COLUMNS],
            "range": [-0.5, len(COLUMNS) - 0.5],
            "side": "top",
            "tickangle": 0,
            "tickfont": {"size": 9 if numbers else 11},
        }
        | _BARE,
        y_axis={
            "tickvals": list(middles),
            "ticktext": ["<br>".join(map(safe_text, row)) for row in ROWS],
            "range": [edges[-1], 0],
            "automargin": True,
            "tickfont": {"size": 9 if numbers else 11},
        }
        | _BARE,
    )


_BARE: Trace = {"showgrid": False, "showline": False, "ticks": "", "fixedrange": True}


def _break_words(name: str, narrow: bool) -> str:
    """Break a name into one word per line; narrow screens also break long words."""
    parts = name.replace("synchronous", "syn- chronous").split() if narrow else name.split()
    return "<br>".join(map(safe_text, parts))


def _hover(row: Row, column: str, methods: _CellMethods) -> str:
    lines = map(method_text, methods.values()) if methods else ["no method here"]
    return "<br>".join([f"<b>{title(row, column)}</b>", *lines])


def method_text(places: Sequence[MethodInCell]) -> str:
    """Return a cell's hover text: `AllReduce (Vishnu 2016): none, quantization · sequential, …`."""
    first = places[0]
    details = [
        ", ".join(dict.fromkeys(getattr(standing.cell, axis) for standing in places))
        for axis in ("compression", "scheduling")
    ]
    names = [*first.notebooks[:_SHOWN], *["…"] * (len(first.notebooks) > _SHOWN)]
    text = f"{first.method} ({first.paper}): {' · '.join([*details, ', '.join(names)])}"
    return safe_text(text)
