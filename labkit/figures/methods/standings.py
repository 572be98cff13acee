"""Where methods stand, as rows and columns: two axes of the taxonomy down, one across."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from typing import NamedTuple

from labkit.strategies import AXES, Cell

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
        """The architecture, and what is divided."""
        return self.cell.architecture, self.cell.parallelism


def grid(standings: Iterable[Standing]) -> Mapping[tuple[Row, str], Mapping[str, list[Standing]]]:
    """Of each row and column the methods by name, with all places that they have there.

    Empty cells have a mapping, too, in the order of rows, then of columns.
    """
    found: dict[tuple[Row, str], dict[str, list[Standing]]] = {
        place: {} for place in product(ROWS, COLUMNS)
    }
    for each in standings:
        here = found[each.row, each.cell.synchronization]
        here.setdefault(each.method, []).append(each)
    return found


def empty(standings: Iterable[Standing]) -> list[str]:
    """The rows with empty cells in words: `collective × data: asynchronous, …`."""
    bare = [place for place, methods in grid(standings).items() if not methods]
    said = []
    for row, places in groupby(bare, key=lambda place: place[0]):
        columns = [column for _, column in places]
        what = "none at all" if len(columns) == len(COLUMNS) else ", ".join(columns)
        said.append(f"{' × '.join(row)}: {what}")
    return said
