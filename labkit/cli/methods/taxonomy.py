"""The map of strategies in Markdown: two tables over five axes, empty cells and axis values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from labkit.cli.methods.places import Placed, axes
from labkit.figures.taxonomy import COLUMNS, ROWS, MethodInCell, empty, grid
from labkit.strategies import AXES

EMPTY = "—"


def taxonomy(every: Sequence[Placed], place: str) -> Iterator[str]:
    """Yield the Markdown lines of the map.

    Args:
        every: All strategies, as the function `placed` returns them.
        place: Path of the notebooks' folder, relative to the page with the map.
    """
    standings = [standing for each in every for standing in each.standings()]
    known = {each.method.name: each for each in every}
    yield from [
        "",
        "## Map of the strategies",
        "",
        "Table rows are architecture and parallelism, and columns are synchronization. "
        "Each entry names a strategy, its paper and the notebook that uses it most. A strategy "
        "is listed in every cell that its fields allow. For an interactive page, run `labkit "
        "methods --map map.html`.",
        "",
    ]
    yield from _by_architecture(standings, known, place)
    yield from ["", "Cells without a method:", ""]
    yield from (f"- {line}" for line in empty(standings))
    yield from [
        "",
        "Table rows are synchronization and compression, and columns are scheduling of "
        "the messages:",
        "",
    ]
    yield from _by_compression(standings)
    yield from [
        "",
        "Values of each axis of the taxonomy, with the methods that have each value:",
        "",
    ]
    for axis, places in axes():
        for name, description, members in places:
            yield f"- {axis}, **{name}**: {description} ({', '.join(members) or 'none'})"


def _by_architecture(
    standings: Iterable[MethodInCell], known: Mapping[str, Placed], place: str
) -> Iterator[str]:
    cells = grid(standings)
    yield from _head("architecture × parallelism", COLUMNS)
    for row in ROWS:
        entries = (
            [_entry(known[name], place) for name in cells[row, column]] for column in COLUMNS
        )
        yield _row(" × ".join(row), entries)


def _by_compression(standings: Sequence[MethodInCell]) -> Iterator[str]:
    columns = list(AXES["scheduling"])
    yield from _head("synchronization × compression", columns)
    for row in product(AXES["synchronization"], AXES["compression"]):
        here = [s for s in standings if (s.cell.synchronization, s.cell.compression) == row]
        entries = (
            dict.fromkeys(_link(s.method) for s in here if s.cell.scheduling == column)
            for column in columns
        )
        yield _row(" × ".join(row), entries)


def _head(corner: str, columns: Sequence[str]) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"


def _row(head: str, cells: Iterable[Iterable[str]]) -> str:
    return f"| {head} | {' | '.join('<br>'.join(cell) or EMPTY for cell in cells)} |"


def _entry(each: Placed, place: str) -> str:
    """Return a strategy's Markdown entry with links, such as `AllReduce, Vishnu 2016, tour`."""
    first = each.notebooks[:1]  # the notebook with the most mentions of the strategy
    links = [f"[{path.stem}]({Path(place, path.name).as_posix()})" for path in first]
    return ", ".join([_link(each.method.name), each.method.cited, *links])


def _link(name: str) -> str:
    """Return a link to the section about a method on the page of methods."""
    return f"[{name}](#{name.lower()})"
