"""The map of methods in Markdown: two tables over the five axes, empty cells in words, places."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from labkit.cli.methods.places import Placed, axes
from labkit.figures.taxonomy import COLUMNS, ROWS, Standing, empty, grid
from labkit.strategies import AXES

EMPTY = "—"


def taxonomy(every: Sequence[Placed], place: str) -> Iterator[str]:
    """The lines.

    Args:
        every: strategies with their cells.
        place: of the notebooks, from where the page lies.
    """
    standings = [standing for each in every for standing in each.standings()]
    known = {each.method.name: each for each in every}
    yield from [
        "",
        "## Where strategies stand",
        "",
        "By architecture and what is divided (down), and who waits for whom (across): each with "
        "its paper and the notebook that names it most. A strategy stands in every cell to which "
        "its fields can bring it. The same as a page to explore: `labkit methods --map map.html`.",
        "",
    ]
    yield from _by_architecture(standings, known, place)
    yield from ["", "No method here:", ""]
    yield from (f"- {line}" for line in empty(standings))
    yield from ["", "By who waits and what is compressed (down), and when messages travel:", ""]
    yield from _by_compression(standings)
    yield from ["", "What the places say, and who stands there:", ""]
    for axis, places in axes():
        for name, said, members in places:
            yield f"- {axis}, **{name}**: {said} ({', '.join(members) or 'nobody'})"


def _by_architecture(
    standings: Iterable[Standing], known: Mapping[str, Placed], place: str
) -> Iterator[str]:
    laid = grid(standings)
    yield from _head("architecture × parallelism", COLUMNS)
    for row in ROWS:
        own = ([_entry(known[name], place) for name in laid[row, column]] for column in COLUMNS)
        yield _row(" × ".join(row), own)


def _by_compression(standings: Sequence[Standing]) -> Iterator[str]:
    columns = list(AXES["scheduling"])
    yield from _head("synchronization × compression", columns)
    for row in product(AXES["synchronization"], AXES["compression"]):
        here = [s for s in standings if (s.cell.synchronization, s.cell.compression) == row]
        own = (
            dict.fromkeys(_link(s.method) for s in here if s.cell.scheduling == column)
            for column in columns
        )
        yield _row(" × ".join(row), own)


def _head(corner: str, columns: Sequence[str]) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"


def _row(head: str, cells: Iterable[Iterable[str]]) -> str:
    return f"| {head} | {' | '.join('<br>'.join(cell) or EMPTY for cell in cells)} |"


def _entry(each: Placed, place: str) -> str:
    """`AllReduce, Vishnu 2016, tour`, with links."""
    first = each.notebooks[:1]  # the one that names it most often
    links = [f"[{path.stem}]({Path(place, path.name).as_posix()})" for path in first]
    return ", ".join([_link(each.method.name), each.method.cited, *links])


def _link(name: str) -> str:
    """To the method's own lines on the page."""
    return f"[{name}](#{name.lower()})"
