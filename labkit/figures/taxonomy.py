"""Taxonomy of methods: a grid of architectures, parallelism and synchronization."""

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

Row = tuple[str, str]  # an architecture, a parallelism
ROWS: Sequence[Row] = tuple(product(AXES["architecture"], AXES["parallelism"]))
COLUMNS: Sequence[str] = tuple(AXES["synchronization"])


class Standing(NamedTuple):
    """A method in one of its cells.

    Attributes:
        method: its name.
        paper: author and year.
        notebooks: names of those that try it.
        cell: its place on each axis.
    """

    method: str
    paper: str
    notebooks: tuple[str, ...]
    cell: Cell

    @property
    def row(self) -> Row:
        """The architecture, and the parallelism."""
        return self.cell.architecture, self.cell.parallelism


def grid(standings: Iterable[Standing]) -> Mapping[tuple[Row, str], Mapping[str, list[Standing]]]:
    """Return the methods of each row and column by name, with all their places.

    Empty cells have a mapping, too, in the order of rows, then of columns.
    """
    results: dict[tuple[Row, str], dict[str, list[Standing]]] = {
        place: {} for place in product(ROWS, COLUMNS)
    }
    for each in standings:
        here = results[each.row, each.cell.synchronization]
        here.setdefault(each.method, []).append(each)
    return results


def empty(standings: Iterable[Standing]) -> list[str]:
    """Return the rows with empty cells as text: `collective × data: asynchronous, …`."""
    bare = [place for place, methods in grid(standings).items() if not methods]
    texts = []
    for row, places in groupby(bare, key=lambda place: place[0]):
        columns = [column for _, column in places]
        what = "none at all" if len(columns) == len(COLUMNS) else ", ".join(columns)
        texts.append(f"{' × '.join(row)}: {what}")
    return texts


EMPTY = "—"
# Sky blue of Okabe and Ito, as far as text stays legible on it; a cell with one method has some.
_COLORS: Scale = [
    (0, "rgba(86,180,233,0)"),
    (1e-6, "rgba(86,180,233,0.2)"),
    (1, "rgba(86,180,233,0.55)"),
]
_LINE, _ROOM, _NUMBER = 15, 14, 34  # pixels: a name, around names, a row of numbers
_SHOWN = 5  # notebooks that are named under the pointer

_Here = Mapping[str, Sequence[Standing]]


def taxonomy_map(standings: Iterable[Standing], numbers: bool = False) -> Figure:
    """Draw methods by architecture and parallelism (down) and synchronization (across).

    Hover texts have compression and scheduling of a method there, with its paper and
    its notebooks. A cell without a method has no colour, and a dash in it.

    Args:
        standings: methods in their cells.
        numbers: how many methods a cell has, in place of their names: for a narrow screen.
    """
    shown = list(standings)
    laid = grid(shown)
    edges = _edges(laid, numbers)
    filled = [place for place, methods in laid.items() if methods]
    texts = [f"{' × '.join(place[0])}, {place[1]}: {', '.join(laid[place])}" for place in filled]
    count = plural(len({each.method for each in shown}), "method")
    texts = [f"{count} in {len(filled)} of {plural(len(laid), 'cell')}", *texts]
    return Sheet(
        [[_panel(laid, edges, numbers)]],
        [],
        "Where methods stand",
        words=[*texts, f"No method here: {'; '.join(empty(shown))}"],
        plot=int(edges[-1]),
        below=8,
    ).figure()


def title(row: Row, column: str) -> str:
    """Return `collective × data, synchronous`, escaped for Plotly."""
    return safe_text(f"{' × '.join(row)}, {column}")


def _edges(laid: Mapping[tuple[Row, str], _Here], numbers: bool) -> np.ndarray:
    """Return the pixels between rows, each as high as its fullest cell."""
    most = [max(len(laid[row, column]) for column in COLUMNS) for row in ROWS]
    heights = [_NUMBER if numbers else _LINE * max(2, each) + _ROOM for each in most]
    return np.cumsum([0, *heights])


def _panel(laid: Mapping[tuple[Row, str], _Here], edges: np.ndarray, numbers: bool) -> Panel:
    import pandas as pd

    shape = (len(ROWS), len(COLUMNS))
    counts = np.array([len(methods) for methods in laid.values()]).reshape(shape)
    hover = np.array([_hover(*place, methods) for place, methods in laid.items()])
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
        for methods in laid.values()
    ]
    columns, rows = np.meshgrid(np.arange(len(COLUMNS)), middles)
    written = pd.DataFrame({"x": columns.ravel(), "y": rows.ravel(), "text": texts})
    return Panel(
        title="",
        x="",
        y="",
        traces=[
            colors | {"customdata": hover.reshape(shape)},
            words(written, "x", "y", size=12 if numbers else 11),
        ],
        x_axis={
            "tickvals": list(range(len(COLUMNS))),
            "ticktext": [_broken(column, numbers) for column in COLUMNS],
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


def _broken(name: str, narrow: bool) -> str:
    """Return a word a line; a narrow screen also breaks long words."""
    parts = name.replace("synchronous", "syn- chronous").split() if narrow else name.split()
    return "<br>".join(map(safe_text, parts))


def _hover(row: Row, column: str, methods: _Here) -> str:
    lines = map(in_a_line, methods.values()) if methods else ["no method here"]
    return "<br>".join([f"<b>{title(row, column)}</b>", *lines])


def in_a_line(places: Sequence[Standing]) -> str:
    """Return `AllReduce (Vishnu 2016): none, quantization · sequential, overlap · tour, …`."""
    first = places[0]
    details = [
        ", ".join(dict.fromkeys(getattr(each.cell, axis) for each in places))
        for axis in ("compression", "scheduling")
    ]
    names = [*first.notebooks[:_SHOWN], *["…"] * (len(first.notebooks) > _SHOWN)]
    text = f"{first.method} ({first.paper}): {' · '.join([*details, ', '.join(names)])}"
    return safe_text(text)
