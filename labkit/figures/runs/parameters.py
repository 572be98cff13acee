"""Results over parameters: parallel coordinates, heat maps, and the history of a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.common.units import plural
from labkit.figures.kit.axes import Scale, scale, text_of, title_of, word
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    MANY,
    PALETTE,
    Entry,
    clock_and_network,
    safe_text,
    settings,
)
from labkit.figures.kit.marks import QUIET, cells, rule, words
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import Sheet, overload, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import (
    RESULTS,
    Value,
    is_timed,
    measured,
    ordered,
    parameters,
    values_of,
)
from labkit.records.analysis.search_results import Searched
from labkit.records.analysis.two_parameters import axes_of, crossed, has_grid
from labkit.records.run import Run

__all__ = ["has_grid", "heat_map"]

_MOST = 9  # more axes than this leave no room for their words
_BELOW, _ABOVE = -0.055, 1.055  # where the ends of an axis are named
_ACROSS = 125  # letters that fit beside each other
_SPREAD = 0.5  # share of a slot over which its runs stand side by side

Axis = tuple[str, list[Value], Scale]


def parallel_coordinates(runs: Iterable[Run] | Run, axes: Sequence[str] | None = None) -> Figure:
    """Draw each run as a line over its parameters and results.

    A run whose equivalence gate failed has no speed, so its line is broken there.

    Args: runs: to compare; axes: names of parameters and metrics, from left to right (by default
    the parameters that differ but for the seed, then accuracy or loss, bytes, samples/s).
    Raises: LabkitError where there are no runs; InvalidInput, a name that no run has.
    """
    return parallel_sheet(settings(runs), axes).figure()


def parallel_sheet(shown: Sequence[Entry], axes: Sequence[str] | None = None) -> Sheet:
    """Return the sheet of `parallel_coordinates`, of entries."""
    chosen = _axes(shown, axes)
    panel = Panel(
        title="",
        x="",
        y="",
        traces=[*_lines(shown, chosen), _rules(len(chosen)), _ticks(chosen)],
        note=refusals(shown),
        always_note=bool(refusals(shown)),
        x_axis=_names(chosen),
        y_axis={"visible": False, "range": [-0.1, 1.1], "fixedrange": True},
    )
    title = f"Parameters and results · {clock_and_network(shown)}"
    details = [_line_in_words(entry, chosen, place) for place, entry in enumerate(shown)]
    details.append(refusals(shown))
    return Sheet([[panel]], shown, title, overload(shown), details, plot=300, below=24)


def _axes(shown: Sequence[Entry], names: Sequence[str] | None) -> list[Axis]:
    runs = [entry.run for entry in shown]
    given = parameters(runs)
    if names is None:
        # Chance and a label explain no result.
        names = [name for name in given if name not in ("seed", "name")][: _MOST - len(RESULTS)]
        # A result that all runs share distinguishes none of them.
        names += [name for name in RESULTS if len(set(measured(runs, name))) > 1]
    chosen = list(names) or list(given) or [RESULTS[0]]
    columns = [(name, values_of(runs, name, given)) for name in chosen]
    return [(name, values, scale(values, name not in given)) for name, values in columns]


def _lines(shown: Sequence[Entry], axes: Sequence[Axis]) -> list[Trace]:
    beside = [_side_by_side(each) for _, _, each in axes]
    few = len(shown) <= MANY
    return [
        {
            "x": list(range(len(axes))),
            "y": [None if (y := column[place]) is None else round(y, 4) for column in beside],
            "mode": "lines+markers" if few else "lines",
            "line": {"color": entry.color, "dash": entry.dash, "width": 2 if few else 1.5},
            "marker": {"color": entry.color, "symbol": entry.symbol, "size": 7} if few else None,
            "text": [_said(axis, place) for axis in axes],
            "hovertemplate": "%{text}",
            "showlegend": False,
        }
        | entry.style
        for place, entry in enumerate(shown)
    ]


def _side_by_side(each: Scale) -> list[float | None]:
    """Return places where runs of the same slot do not cover each other."""
    if not each.slots:
        return list(each.places)
    # Half of a slot stays free, to separate the runs of neighbouring slots.
    room = _SPREAD / len(each.ticks)
    members: dict[float | None, list[int]] = {}
    for place, value in enumerate(each.places):
        members.setdefault(value, []).append(place)
    spread = list(each.places)
    for value, group in members.items():
        for number, place in enumerate(group):
            if value is not None and len(group) > 1:
                spread[place] = value + room * (number / (len(group) - 1) - 0.5)
    return spread


def _rules(count: int) -> Trace:
    """Return the axes themselves, as one trace."""
    return rule([x for place in range(count) for x in (place, place, None)], [0, 1, None] * count)


def _ticks(axes: Sequence[Axis]) -> Trace:
    """Return texts above the slots of words, and at the ends of axes of numbers."""
    room = _ACROSS // len(axes) + 1  # letters, up to the words of the next axis
    rows = [
        (place, y, safe_text(text), f"middle {side}")
        for place, (name, _, on) in enumerate(axes)
        for y, text, side in (
            _slot_words(name, on, room if place else 0) if on.slots else _ends(name, on)
        )
    ]
    table = pd.DataFrame(rows, columns=["x", "y", "text", "side"])
    drawn = words(table, "x", "y")
    return drawn | {"textposition": list(table["side"]), "cliponaxis": False}


def _slot_words(name: str, on: Scale, room: int) -> list[tuple[float, str, str]]:
    """Return the texts of slots, at the places that fewest lines cross."""
    up, side = ((0.5 + _SPREAD / 2) / 2 / len(on.ticks), "right") if room else (0.0, "left")
    gap = "\N{NO-BREAK SPACE}" * 2
    details = [(at + up, word(name, value)) for at, value in on.ticks]
    cut = [(y, f"{w[: room - 1]}…" if 0 < room < len(w) else w) for y, w in details]
    return [(y, f"{gap}{text}{gap}", side) for y, text in cut]


def _ends(name: str, on: Scale) -> list[tuple[float, str, str]]:
    # One value for all is named once, above.
    ends = [on.ticks[0], on.ticks[-1]] if len(on.ticks) > 1 else [(1.0, on.ticks[0][1])]
    return [(_BELOW if at == 0 else _ABOVE, text_of(name, value), "center") for at, value in ends]


def _names(axes: Sequence[Axis]) -> Trace:
    return {
        "tickvals": list(range(len(axes))),
        "ticktext": [safe_text(title_of(name)) for name, _, _ in axes],
        "side": "top",
        "showgrid": False,
        "showline": False,
        "tickangle": 0,
        "range": [-_room(axes), len(axes) - 1 + 0.035 * len(axes)],
        "fixedrange": True,
    }


def _room(axes: Sequence[Axis]) -> float:
    """Return the room left of the first axis for its texts, in distances of axes."""
    name, _, on = axes[0]
    letters = max(len(word(name, value)) for _, value in on.ticks) + 2 if on.slots else 0
    return max(0.035, letters / _ACROSS) * len(axes)


def _said(axis: Axis, place: int) -> str:
    name, values, _ = axis
    return safe_text(f"{title_of(name)}: {text_of(name, values[place])}")


def _line_in_words(entry: Entry, axes: Sequence[Axis], place: int) -> str:
    details = [_said(axis, place) for axis in axes if axis[1][place] is not None]
    return f"{entry.label}: {', '.join(details)}"


_COLORS = "Cividis"  # Nuñez, Anderton, Renslow (2018): the same order for any colour vision
_CELL = 34  # pixels of a row


def heat_map(
    runs: Iterable[Run] | Run,
    x: str | None = None,
    y: str | None = None,
    measures: Sequence[str] = (),
) -> Figure:
    """Draw results over two parameters, a panel a measure; a cell is the median of its runs.

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
    """Return the sheet of `heat_map`, of entries."""
    all_runs = [entry.run for entry in shown]
    x, y = axes_of(all_runs, x, y)
    table = crossed({entry.key: entry.run for entry in shown}, x, y, measures)
    names = list(table.columns[4:])  # the measures, see `crossed`
    several = max(map(len, table["runs"]))
    remarks = [f"median of up to {several} runs a cell" if several > 1 else "a run a cell"]
    others = [name for name in parameters(all_runs) if name not in (x, y)]
    remarks += [f"they differ in {', '.join(others)}"] if others and several > 1 else []
    title = f"Results by {title_of(y)} and {title_of(x)} · {clock_and_network(shown)}"
    grid = Grid(x, y, ordered(list(table[x])), ordered(list(table[y])))
    laid = {name: _laid_out(table, grid, name) for name in names}
    panels = [_panel(each, grid, name, name == names[0]) for name, each in laid.items()]
    details = [_cells_in_words(each, name) for name, each in laid.items()]
    plot = max(140, _CELL * len(grid.down))
    return Sheet([panels], [], title, [*remarks, *overload(shown)], details, plot=plot)


class Grid(NamedTuple):
    """Two parameters, and their values to the right and down."""

    x: str
    y: str
    across: list[Value]
    down: list[Value]


def _laid_out(table: pd.DataFrame, grid: Grid, name: str) -> pd.DataFrame:
    """Return a row a cell, also for those without runs: place, runs, value and texts."""
    group = {(repr(row[grid.y]), repr(row[grid.x])): row for row in table.to_dict("records")}
    rows = []
    for row, down in enumerate(grid.down):
        for column, across in enumerate(grid.across):
            cell = group.get((repr(down), repr(across)), {})
            value, failed = cell.get(name, np.nan), cell.get("gate_failed", 0)
            text = "gate failed" if failed and is_timed(name) else "—"
            text = text if np.isnan(value) else text_of(name, value)
            named = ((grid.y, down), (grid.x, across))
            details = ", ".join(f"{title_of(each)} {word(each, at)}" for each, at in named)
            runs = cell.get("runs", ())
            rows.append((column, row, runs, value, failed, text, details))
    return pd.DataFrame(rows, columns=["x", "y", "runs", "value", "failed", "text", "details"])


def _panel(laid: pd.DataFrame, grid: Grid, name: str, first: bool) -> Panel:
    from plotly.colors import get_colorscale

    def in_rows(values: Sequence[str] | Sequence[float]) -> np.ndarray:
        return np.asarray(values).reshape(len(grid.down), len(grid.across))

    blank = laid["value"].isna()
    failed = laid["failed"].sum() if is_timed(name) else 0
    hover = [
        safe_text(f"{row.details}: {row.text}, {plural(len(row.runs), 'run')}")
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


def _dots(laid: pd.DataFrame) -> Trace:
    """Return a dot in each cell with runs, visible only for a chosen run."""
    # Cells of a heat map cannot be chosen in Plotly: a point in each stands for them.
    group = laid[laid["runs"].map(len) > 0]
    ring = {"width": 2, "color": "#000000"}
    marker = {"symbol": "circle", "size": 9, "color": "#ffffff", "line": ring, "opacity": 0}
    return {
        "x": list(group["x"] - 0.38),
        "y": list(group["y"]),
        "mode": "markers",
        "marker": marker,
        "selected": {"marker": {"opacity": 1}},
        "unselected": {"marker": {"opacity": 0}},
        **QUIET,
        "meta": {"points": [list(runs) for runs in group["runs"]]},
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


def _cells_in_words(laid: pd.DataFrame, name: str) -> str:
    group = laid[laid["runs"].map(len) > 0]
    return f"{title_of(name).capitalize()}: {'; '.join(group['details'] + ': ' + group['text'])}"


def search_history(results: Searched) -> Figure:
    """Draw the value of each trial, the best so far as a line, and importances as bars."""
    metric, trials = safe_text(results.metric), results.trials
    points = [
        _points(trials[trials["state"] == state], state, symbol)
        for state, symbol in (("complete", "circle"), ("pruned", "x"))
    ]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": trials["trial"].tolist(),
        "y": trials["best"].tolist(),
        "line": {"shape": "hv", "color": PALETTE[0]},
        "name": "best so far",
        "showlegend": False,
    }
    history = Panel(
        "Trials in order\n● complete, × pruned, line: best so far", "trial", metric, [line, *points]
    )
    names = list(results.importances)[::-1]
    bars: Trace = {
        "type": "bar",
        "orientation": "h",
        "x": [results.importances[name] for name in names],
        "y": [safe_text(name) for name in names],
        "marker": {"color": PALETTE[0]},
        "showlegend": False,
    }
    importance = Panel(
        "What mattered\nOptuna's importance, of 1",
        "share",
        "",
        [bars] if names else [],
        note="one parameter, or too few trials",
    )
    pruned = int((trials["state"] == "pruned").sum())
    words = [f"{len(trials)} trials, {pruned} pruned"]
    if trials["best"].notna().any():
        words.append(f"best {results.metric} {trials['best'].iloc[-1]:.6g}")
    words += [f"importance of {name} {share:.2f}" for name, share in results.importances.items()]
    return sheet([[history, importance]], [], f"Search for {results.metric}", words=words)


def _points(trials: pd.DataFrame, state: str, symbol: str) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": trials["trial"].tolist(),
        "y": trials["value"].tolist(),
        "marker": {"symbol": symbol, "color": INK},
        "name": state,
        "showlegend": False,
        "hovertemplate": f"trial %{{x}}, {state}: %{{y:.6g}}<extra></extra>",
    }
