"""Heat maps: a result over two parameters, where the runs have most of their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from labkit.common.errors import InvalidInput
from labkit.common.units import plural
from labkit.figures.kit.axes import Value, ordered, word
from labkit.figures.kit.entries import Entry, clock_and_network, entries, safe_text
from labkit.figures.kit.marks import QUIET, words
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.measures import (
    MEASURES,
    is_timed,
    measured,
    numbers,
    parameters,
    text_of,
    title_of,
    unknown,
)
from labkit.records.run import Run

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

_NO_AXIS = ("seed", "name")  # chance and a label are what cells take the median over
_COLORS = "Cividis"  # Nuñez, Anderton, Renslow (2018): the same order for any colour vision
_FILLED = 0.75  # of all combinations: with fewer it is no grid
_CELL = 34  # pixels of a row


@dataclass(frozen=True)
class Grid:
    """Two parameters, their values, and the places of the runs in each cell (row, column)."""

    x: str
    y: str
    columns: list[Value]
    rows: list[Value]
    cells: dict[tuple[int, int], list[int]]

    @property
    def filled(self) -> bool:
        """Whether there are two rows and columns or more, and runs for most combinations."""
        enough = min(len(self.columns), len(self.rows)) > 1
        return enough and len(self.cells) >= _FILLED * len(self.columns) * len(self.rows)


def heat_map(
    runs: Iterable[Run] | Run,
    x: str | None = None,
    y: str | None = None,
    measures: Sequence[str] = (),
) -> Figure:
    """Results over two parameters, a panel a measure; a cell is the median of its runs.

    Runs whose equivalence gate failed are in no cell of a speed.

    Args: runs: to compare; x, y: names of parameters that differ (by default the two whose
    combinations make the largest grid); measures: names of metrics (by default test accuracy
    or loss, and samples/s).
    Raises: LabkitError where there are no runs; InvalidInput, where no such grid is there.
    """
    shown = entries(runs)
    grid = _grid(shown, x, y)
    names = list(measures) or _default_measures(shown)
    panels = [_panel(shown, grid, name, first=name == names[0]) for name in names]
    several = max(len(places) for places in grid.cells.values())
    remarks = [f"median of up to {several} runs a cell" if several > 1 else "a run a cell"]
    others = [n for n in parameters(shown) if n not in (grid.x, grid.y)]
    remarks += [f"they differ in {', '.join(others)}"] if others and several > 1 else []
    title = f"Results by {title_of(grid.y)} and {title_of(grid.x)} · {clock_and_network(shown)}"
    said = [_in_words(shown, grid, name) for name in names]
    plot = max(140, _CELL * len(grid.rows))
    return sheet([panels], [], title, [*remarks, *busy(shown)], said, plot=plot)


def has_grid(runs: Iterable[Run]) -> bool:
    """Whether two parameters make a grid of which a heat map can be drawn."""
    found = list(runs)
    return bool(found) and _largest(entries(found)) is not None


def _grid(shown: Sequence[Entry], x: str | None, y: str | None) -> Grid:
    given = parameters(shown)
    for name in (x, y):
        if name is not None and name not in given:
            raise unknown(shown, name)
    if x is not None and y is not None:
        return _crossed(given, x, y)
    found = _largest(shown, x or y)
    if found is None:
        raise InvalidInput(
            "no two parameters of these runs have runs for most of their combinations; name "
            f"two of those that differ as x and y: {', '.join(given) or 'there are none'}"
        )
    # The largest grid may have the parameter that was asked for on the other axis.
    swap = (x is not None and found.x != x) or (y is not None and found.y != y)
    return _crossed(given, found.y, found.x) if swap else found


def _largest(shown: Sequence[Entry], fixed: str | None = None) -> Grid | None:
    """The grid with runs in most cells; numbers go to the right, words down."""
    given = parameters(shown)
    names = [name for name in given if name not in _NO_AXIS or name == fixed]
    pairs = [pair for pair in combinations(names, 2) if fixed is None or fixed in pair]
    filled = [grid for one, other in pairs if (grid := _crossed(given, other, one)).filled]
    best = max(filled, key=lambda grid: len(grid.cells), default=None)
    if best is not None and _words(best.columns) and not _words(best.rows):
        return _crossed(given, best.y, best.x)
    return best


def _words(values: Sequence[Value]) -> bool:
    return any(isinstance(value, str) for value in values)


def _crossed(given: dict[str, list[Value]], x: str, y: str) -> Grid:
    # Both sorted, so that a trend is seen as one.
    columns, rows = ordered(given[x]), ordered(given[y])
    places: list[dict[str, int]] = [
        {repr(value): place for place, value in enumerate(values)} for values in (columns, rows)
    ]
    cells: dict[tuple[int, int], list[int]] = {}
    for run, (column, row) in enumerate(zip(given[x], given[y], strict=True)):
        cells.setdefault((places[1][repr(row)], places[0][repr(column)]), []).append(run)
    return Grid(x, y, columns, rows, cells)


def _default_measures(shown: Sequence[Entry]) -> list[str]:
    # A regression has no accuracy.
    judged = "test_accuracy" if any(measured(shown, "test_accuracy")) else "test_loss"
    return [judged, "samples_per_second"]


def _values(shown: Sequence[Entry], grid: Grid, name: str) -> dict[tuple[int, int], float]:
    column = measured(shown, name)
    if name not in MEASURES and name not in numbers(shown):
        raise unknown(shown, name)
    known = {
        cell: [value for place in places if (value := column[place]) is not None]
        for cell, places in grid.cells.items()
    }
    return {cell: median(values) for cell, values in known.items() if values}


def _panel(shown: Sequence[Entry], grid: Grid, name: str, first: bool) -> Panel:
    values = _values(shown, grid, name)
    failed = [entry for entry in shown if entry.gate_failed] if is_timed(name) else []
    without = f"{plural(len(failed), 'run')} without speed: equivalence gate failed"
    size = range(len(grid.rows)), range(len(grid.columns))
    text = [[_cell(shown, grid, name, values, (r, c)) for c in size[1]] for r in size[0]]
    rows = list(enumerate(text))
    colors: Trace = {
        "type": "heatmap",
        "z": [[values.get((row, column)) for column in size[1]] for row in size[0]],
        "text": [[t if (r, c) in values else "" for c, t in enumerate(row)] for r, row in rows],
        "texttemplate": "%{text}",
        "customdata": [[_said(grid, t, (r, c)) for c, t in enumerate(row)] for r, row in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "colorscale": _COLORS,
        "showscale": False,
        "xgap": 2,
        "ygap": 2,
    }
    return Panel(
        title=title_of(name).capitalize(),
        x=title_of(grid.x),
        y=title_of(grid.y) if first else "",
        traces=[colors, _blanks(text, values), _dots(shown, grid)] if values else [],
        note=without if failed else "",
        always_note=bool(failed),
        x_axis=_axis(grid.x, grid.columns) | {"range": [-0.5, len(grid.columns) - 0.5]},
        # The rows are the same in all panels: the first one names them.
        y_axis=_axis(grid.y, grid.rows)
        | {"range": [len(grid.rows) - 0.5, -0.5], "showticklabels": first},
    )


def _blanks(text: list[list[str]], values: dict[tuple[int, int], float]) -> Trace:
    """Why a cell has no colour."""
    import pandas as pd

    cells = [
        {"x": column, "y": row, "text": said}
        for row, texts in enumerate(text)
        for column, said in enumerate(texts)
        if (row, column) not in values
    ]
    return words(pd.DataFrame(cells, columns=["x", "y", "text"]), "x", "y", size=12)


def _dots(shown: Sequence[Entry], grid: Grid) -> Trace:
    """A dot at the left of each cell with runs, seen only where one of them is chosen."""
    # Cells of a heat map cannot be chosen in Plotly: a point in each stands for them.
    cells = list(grid.cells)
    return {
        "x": [column - 0.38 for _, column in cells],
        "y": [row for row, _ in cells],
        "mode": "markers",
        "marker": {
            "symbol": "circle",
            "size": 9,
            "color": "#ffffff",
            "line": {"width": 2, "color": "#000000"},
            "opacity": 0,
        },
        "selected": {"marker": {"opacity": 1}},
        "unselected": {"marker": {"opacity": 0}},
        **QUIET,
        "meta": {"points": [[shown[place].key for place in grid.cells[cell]] for cell in cells]},
    }


def _axis(name: str, values: Sequence[Value]) -> Trace:
    return {
        "tickvals": list(range(len(values))),
        "ticktext": [safe_text(word(name, value)) for value in values],
        "showgrid": False,
        "showline": False,
        "ticks": "",
        "automargin": True,
    }


def _cell(
    shown: Sequence[Entry],
    grid: Grid,
    name: str,
    values: dict[tuple[int, int], float],
    cell: tuple[int, int],
) -> str:
    if cell in values:
        return text_of(name, values[cell])
    if is_timed(name) and any(shown[place].gate_failed for place in grid.cells.get(cell, [])):
        return "gate failed"
    return "—"


def _combination(grid: Grid, cell: tuple[int, int]) -> str:
    row, column = cell
    parts = ((grid.y, grid.rows[row]), (grid.x, grid.columns[column]))
    return ", ".join(f"{title_of(name)} {word(name, value)}" for name, value in parts)


def _said(grid: Grid, text: str, cell: tuple[int, int]) -> str:
    runs = plural(len(grid.cells.get(cell, [])), "run")
    return safe_text(f"{_combination(grid, cell)}: {text}, {runs}")


def _in_words(shown: Sequence[Entry], grid: Grid, name: str) -> str:
    values = _values(shown, grid, name)
    said = [
        f"{_combination(grid, cell)}: {_cell(shown, grid, name, values, cell)}"
        for cell in sorted(grid.cells)
    ]
    return f"{title_of(name).capitalize()}: {'; '.join(said)}"
