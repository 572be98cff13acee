"""Heat maps: a result over two parameters, where the runs have most of their combinations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.common.units import plural
from labkit.figures.kit.axes import text_of, title_of, word
from labkit.figures.kit.cells import cells
from labkit.figures.kit.entries import Entry, clock_and_network, safe_text, settings
from labkit.figures.kit.marks import QUIET, words
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import Sheet, busy
from labkit.records.analysis.columns import Value, is_timed, ordered, parameters
from labkit.records.analysis.two_parameters import axes_of, crossed, has_grid
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure

__all__ = ["has_grid", "heat_map"]

_COLORS = "Cividis"  # Nuñez, Anderton, Renslow (2018): the same order for any colour vision
_CELL = 34  # pixels of a row


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
    return heat_sheet(settings(runs), x, y, measures).figure()


def heat_sheet(
    shown: Sequence[Entry], x: str | None = None, y: str | None = None, measures: Sequence[str] = ()
) -> Sheet:
    """The same, of entries."""
    found = [entry.run for entry in shown]
    x, y = axes_of(found, x, y)
    table = crossed({entry.key: entry.run for entry in shown}, x, y, measures)
    names = list(table.columns[4:])  # the measures, see `crossed`
    several = max(map(len, table["runs"]))
    remarks = [f"median of up to {several} runs a cell" if several > 1 else "a run a cell"]
    others = [name for name in parameters(found) if name not in (x, y)]
    remarks += [f"they differ in {', '.join(others)}"] if others and several > 1 else []
    title = f"Results by {title_of(y)} and {title_of(x)} · {clock_and_network(shown)}"
    grid = Grid(x, y, ordered(list(table[x])), ordered(list(table[y])))
    laid = {name: _laid_out(table, grid, name) for name in names}
    panels = [_panel(each, grid, name, name == names[0]) for name, each in laid.items()]
    said = [_in_words(each, name) for name, each in laid.items()]
    plot = max(140, _CELL * len(grid.down))
    return Sheet([panels], [], title, [*remarks, *busy(shown)], said, plot=plot)


class Grid(NamedTuple):
    """Two parameters, and their values to the right and down."""

    x: str
    y: str
    across: list[Value]
    down: list[Value]


def _laid_out(table: pandas.DataFrame, grid: Grid, name: str) -> pandas.DataFrame:
    """A row a cell, in order, those without runs too: its place, runs, value, and what it says."""
    import pandas as pd

    own = {(repr(row[grid.y]), repr(row[grid.x])): row for row in table.to_dict("records")}
    rows = []
    for row, down in enumerate(grid.down):
        for column, across in enumerate(grid.across):
            cell = own.get((repr(down), repr(across)), {})
            value, failed = cell.get(name, np.nan), cell.get("gate_failed", 0)
            text = "gate failed" if failed and is_timed(name) else "—"
            text = text if np.isnan(value) else text_of(name, value)
            named = ((grid.y, down), (grid.x, across))
            said = ", ".join(f"{title_of(each)} {word(each, at)}" for each, at in named)
            runs = cell.get("runs", ())
            rows.append((column, row, runs, value, failed, text, said))
    return pd.DataFrame(rows, columns=["x", "y", "runs", "value", "failed", "text", "said"])


def _panel(laid: pandas.DataFrame, grid: Grid, name: str, first: bool) -> Panel:
    from plotly.colors import get_colorscale

    def in_rows(values: Sequence[str] | Sequence[float]) -> np.ndarray:
        return np.asarray(values).reshape(len(grid.down), len(grid.across))

    blank = laid["value"].isna()
    failed = laid["failed"].sum() if is_timed(name) else 0
    hover = [
        safe_text(f"{row.said}: {row.text}, {plural(len(row.runs), 'run')}")
        for row in laid.itertuples()
    ]
    colors: Trace = cells(in_rows(laid["value"]), hover="%{customdata}", gap=2)
    text = in_rows(laid["text"].mask(blank, ""))
    colors |= {"customdata": in_rows(hover), "text": text, "texttemplate": "%{text}"}
    scale = get_colorscale(_COLORS)
    colors |= {"coloraxis": None, "colorscale": scale, "showscale": False}
    # Why a cell has no colour stands in the page's own ink.
    why = words(laid[blank], "x", "y", size=12)
    return Panel(
        title=title_of(name).capitalize(),
        x=title_of(grid.x),
        y=title_of(grid.y) if first else "",
        traces=[] if blank.all() else [colors, why, _dots(laid)],
        note=f"{plural(failed, 'run')} without speed: equivalence gate failed" if failed else "",
        always_note=bool(failed),
        x_axis=_axis(grid.x, grid.across) | {"range": [-0.5, len(grid.across) - 0.5]},
        # The rows are the same in all panels: the first one names them.
        y_axis=_axis(grid.y, grid.down)
        | {"range": [len(grid.down) - 0.5, -0.5], "showticklabels": first},
    )


def _dots(laid: pandas.DataFrame) -> Trace:
    """A dot at the left of each cell with runs, seen only where one of them is chosen."""
    # Cells of a heat map cannot be chosen in Plotly: a point in each stands for them.
    own = laid[laid["runs"].map(len) > 0]
    ring = {"width": 2, "color": "#000000"}
    marker = {"symbol": "circle", "size": 9, "color": "#ffffff", "line": ring, "opacity": 0}
    return {
        "x": list(own["x"] - 0.38),
        "y": list(own["y"]),
        "mode": "markers",
        "marker": marker,
        "selected": {"marker": {"opacity": 1}},
        "unselected": {"marker": {"opacity": 0}},
        **QUIET,
        "meta": {"points": [list(runs) for runs in own["runs"]]},
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


def _in_words(laid: pandas.DataFrame, name: str) -> str:
    own = laid[laid["runs"].map(len) > 0]
    return f"{title_of(name).capitalize()}: {'; '.join(own['said'] + ': ' + own['text'])}"
