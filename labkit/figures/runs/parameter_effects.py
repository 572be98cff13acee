"""Figures of results against run parameters: parallel coordinates, heat maps, search history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.common.units import plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    MANY,
    PALETTE,
    RunEntry,
    clock_and_network,
    safe_text,
    settings,
)
from labkit.figures.kit.marks import QUIET, cells, rule, words
from labkit.figures.kit.panels import AxisScale, Panel, Trace, scale, text_of, title_of, word
from labkit.figures.kit.sheet import Sheet, overload, sheet
from labkit.figures.runs.speed import refusals
from labkit.records.analysis.columns import (
    RESULTS,
    Value,
    axes_of,
    cross_table,
    has_grid,
    is_timed,
    metric_values,
    parameters,
    sorted_values,
    values_of,
)
from labkit.records.analysis.curves import SearchResult
from labkit.records.run import Run

__all__ = ["has_grid", "heat_map"]

_MOST = 9  # maximum number of axes that leaves room for their labels
# An axis reaches from y = 0 to y = 1. `_BELOW` and `_ABOVE` are the y positions of labels below and
# above an axis.
_BELOW, _ABOVE = -0.055, 1.055
_ACROSS = 125  # number of letters that fit in one line across the panel
# Lines of runs with the same value are drawn slightly apart.
_SPREAD = 0.5

Axis = tuple[str, list[Value], AxisScale]


def parallel_coordinates(runs: Iterable[Run] | Run, axes: Sequence[str] | None = None) -> Figure:
    """Draw parallel coordinates: a line per run, and an axis per parameter or result.

    A run that failed its equivalence check has no speed. The line of such a run has a gap at the
    speed axis.

    Args:
        runs: Runs to compare.
        axes: Names of the parameters and metrics to draw, from left to right. By default, the first
            axes are the parameters that differ between runs. The random seed has no axis by
            default. The last axes are accuracy or loss, bytes, and samples/s.

    Raises:
        LabkitError: There are no runs.
        InvalidInput: A name in `axes` is not a parameter or metric of any run.
    """
    return parallel_sheet(settings(runs), axes).figure()


def parallel_sheet(entries: Sequence[RunEntry], axes: Sequence[str] | None = None) -> Sheet:
    """Return the figure of `parallel_coordinates` as a `Sheet` (panels with title and legend)."""
    chosen = _axes(entries, axes)
    panel = Panel(
        title="",
        x="",
        y="",
        traces=[*_lines(entries, chosen), _rules(len(chosen)), _ticks(chosen)],
        note=refusals(entries),
        always_note=bool(refusals(entries)),
        x_axis=_names(chosen),
        y_axis={"visible": False, "range": [-0.1, 1.1], "fixedrange": True},
    )
    title = f"Parameters and results · {clock_and_network(entries)}"
    details = [_line_in_words(entry, chosen, place) for place, entry in enumerate(entries)]
    details.append(refusals(entries))
    return Sheet([[panel]], entries, title, overload(entries), details, plot=300, below=24)


def _axes(shown: Sequence[RunEntry], names: Sequence[str] | None) -> list[Axis]:
    runs = [entry.run for entry in shown]
    parameter_names = parameters(runs)
    if names is None:
        # Seeds and names of runs have no axes, because they do not explain the results.
        names = [name for name in parameter_names if name not in ("seed", "name")][
            : _MOST - len(RESULTS)
        ]
        # A result that is equal in all runs has no axis, because it does not distinguish the runs.
        names += [name for name in RESULTS if len(set(metric_values(runs, name))) > 1]
    chosen = list(names) or list(parameter_names) or [RESULTS[0]]
    columns = [(name, values_of(runs, name, parameter_names)) for name in chosen]
    return [(name, values, scale(values, name not in parameter_names)) for name, values in columns]


def _lines(shown: Sequence[RunEntry], axes: Sequence[Axis]) -> list[Trace]:
    spread_columns = [_side_by_side(column) for _, _, column in axes]
    few = len(shown) <= MANY
    return [
        {
            "x": list(range(len(axes))),
            "y": [
                None if (y := column[place]) is None else round(y, 4) for column in spread_columns
            ],
            "mode": "lines+markers" if few else "lines",
            "line": {"color": entry.color, "dash": entry.dash, "width": 2 if few else 1.5},
            "marker": {"color": entry.color, "symbol": entry.symbol, "size": 7} if few else None,
            "text": [_value_text(axis, place) for axis in axes],
            "hovertemplate": "%{text}",
            "showlegend": False,
        }
        | entry.style
        for place, entry in enumerate(shown)
    ]


def _side_by_side(axis_scale: AxisScale) -> list[float | None]:
    """Return axis positions; runs that share a discrete value are spread, so all are visible."""
    if not axis_scale.slots:
        return list(axis_scale.places)
    # Runs use only half of the space of each discrete value. The empty half separates runs with
    # different values.
    room = _SPREAD / len(axis_scale.ticks)
    members: dict[float | None, list[int]] = {}
    for place, value in enumerate(axis_scale.places):
        members.setdefault(value, []).append(place)
    spread = list(axis_scale.places)
    for value, group in members.items():
        for number, place in enumerate(group):
            if value is not None and len(group) > 1:
                spread[place] = value + room * (number / (len(group) - 1) - 0.5)
    return spread


def _rules(count: int) -> Trace:
    """Return `count` vertical axes as one trace."""
    return rule([x for place in range(count) for x in (place, place, None)], [0, 1, None] * count)


def _ticks(axes: Sequence[Axis]) -> Trace:
    """Return one trace with all axis labels: every discrete value, or both ends if numeric."""
    room = _ACROSS // len(axes) + 1  # number of letters that fit between two axes
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


def _slot_words(name: str, on: AxisScale, room: int) -> list[tuple[float, str, str]]:
    """Return a discrete axis's labels as (y, text, side), at positions that few lines cross."""
    up, side = ((0.5 + _SPREAD / 2) / 2 / len(on.ticks), "right") if room else (0.0, "left")
    gap = "\N{NO-BREAK SPACE}" * 2
    details = [(at + up, word(name, value)) for at, value in on.ticks]
    cut = [(y, f"{w[: room - 1]}…" if 0 < room < len(w) else w) for y, w in details]
    return [(y, f"{gap}{text}{gap}", side) for y, text in cut]


def _ends(name: str, on: AxisScale) -> list[tuple[float, str, str]]:
    # An axis with a single value has only one label, which is above the axis.
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
        "range": [-_left_margin(axes), len(axes) - 1 + 0.035 * len(axes)],
        "fixedrange": True,
    }


def _left_margin(axes: Sequence[Axis]) -> float:
    """Return the width of the first axis's labels, as a multiple of the distance between axes."""
    name, _, on = axes[0]
    letters = max(len(word(name, value)) for _, value in on.ticks) + 2 if on.slots else 0
    return max(0.035, letters / _ACROSS) * len(axes)


def _value_text(axis: Axis, place: int) -> str:
    name, values, _ = axis
    return safe_text(f"{title_of(name)}: {text_of(name, values[place])}")


def _line_in_words(entry: RunEntry, axes: Sequence[Axis], place: int) -> str:
    details = [_value_text(axis, place) for axis in axes if axis[1][place] is not None]
    return f"{entry.label}: {', '.join(details)}"


# The colours are legible with any colour vision (Nuñez, Anderton, Renslow 2018).
_COLORS = "Cividis"
_CELL = 34  # height in pixels of one row of the heat map


def heat_map(
    runs: Iterable[Run] | Run,
    x: str | None = None,
    y: str | None = None,
    measures: Sequence[str] = (),
) -> Figure:
    """Draw a heat map of results by two parameters, with one panel per measure.

    Each cell shows the median over the runs with the cell's parameter values. For speeds, runs that
    failed their equivalence check are excluded.

    Args:
        runs: Runs to compare.
        x, y: Names of two parameters in which the runs differ. By default, the two parameters have
            the largest grid of combinations.
        measures: Names of metrics, one per panel; default: test accuracy or loss, and samples/s.

    Raises:
        LabkitError: There are no runs.
        InvalidInput: The runs do not form a grid of the parameters `x` and `y`.
    """
    return heat_sheet(settings(runs), x, y, measures).figure()


def heat_sheet(
    entries: Sequence[RunEntry],
    x: str | None = None,
    y: str | None = None,
    measures: Sequence[str] = (),
) -> Sheet:
    """Return the figure of `heat_map` as a `Sheet` (panels with title and legend)."""
    all_runs = [entry.run for entry in entries]
    x, y = axes_of(all_runs, x, y)
    table = cross_table({entry.key: entry.run for entry in entries}, x, y, measures)
    # The measures start at the fifth column, because the first four columns of the table are no
    # measures.
    names = list(table.columns[4:])
    several = max(map(len, table["runs"]))
    remarks = [
        f"each cell shows the median of up to {several} runs"
        if several > 1
        else "each cell shows one run"
    ]
    others = [name for name in parameters(all_runs) if name not in (x, y)]
    remarks += (
        [f"the runs in one cell differ in {', '.join(others)}"] if others and several > 1 else []
    )
    title = f"Results by {title_of(y)} and {title_of(x)} · {clock_and_network(entries)}"
    grid = Grid(x, y, sorted_values(list(table[x])), sorted_values(list(table[y])))
    tables = {name: _cell_table(table, grid, name) for name in names}
    panels = [_panel(rows, grid, name, name == names[0]) for name, rows in tables.items()]
    details = [_cells_in_words(rows, name) for name, rows in tables.items()]
    plot = max(140, _CELL * len(grid.down))
    return Sheet([panels], [], title, [*remarks, *overload(entries)], details, plot=plot)


class Grid(NamedTuple):
    """The two parameters of a heat map: their names (`x`, `y`) and values (`across`, `down`)."""

    x: str
    y: str
    across: list[Value]
    down: list[Value]


def _cell_table(table: pd.DataFrame, grid: Grid, name: str) -> pd.DataFrame:
    """Return one row per cell of the heat map, with position, runs, value and texts."""
    group = {(repr(row[grid.y]), repr(row[grid.x])): row for row in table.to_dict("records")}
    rows = []
    for row, down in enumerate(grid.down):
        for column, across in enumerate(grid.across):
            cell = group.get((repr(down), repr(across)), {})
            value, failed = cell.get(name, np.nan), cell.get("equivalence_failed", 0)
            text = "equivalence check failed" if failed and is_timed(name) else "—"
            text = text if np.isnan(value) else text_of(name, value)
            named = ((grid.y, down), (grid.x, across))
            details = ", ".join(f"{title_of(each)} {word(each, at)}" for each, at in named)
            runs = cell.get("runs", ())
            rows.append((column, row, runs, value, failed, text, details))
    return pd.DataFrame(rows, columns=["x", "y", "runs", "value", "failed", "text", "details"])


def _panel(cell_rows: pd.DataFrame, grid: Grid, name: str, first: bool) -> Panel:
    from plotly.colors import get_colorscale

    def in_rows(values: Sequence[str] | Sequence[float]) -> np.ndarray:
        return np.asarray(values).reshape(len(grid.down), len(grid.across))

    blank = cell_rows["value"].isna()
    failed = cell_rows["failed"].sum() if is_timed(name) else 0
    hover = [
        safe_text(f"{row.details}: {row.text}, {plural(len(row.runs), 'run')}")
        for row in cell_rows.itertuples()
    ]
    colors: Trace = cells(in_rows(cell_rows["value"]), hover="%{customdata}", gap=2)
    text = in_rows(cell_rows["text"].mask(blank, ""))
    colors |= {"customdata": in_rows(hover), "text": text, "texttemplate": "%{text}"}
    scale = get_colorscale(_COLORS)
    colors |= {"coloraxis": None, "colorscale": scale, "showscale": False}
    # A cell without a value has no background, so its text is shown in the page's text colour.
    reasons = words(cell_rows[blank], "x", "y", size=12)
    return Panel(
        title=title_of(name).capitalize(),
        x=title_of(grid.x),
        y=title_of(grid.y) if first else "",
        traces=[] if blank.all() else [colors, reasons, _dots(cell_rows)],
        note=f"{plural(failed, 'run')} without speed, because the equivalence check failed"
        if failed
        else "",
        always_note=bool(failed),
        x_axis=_axis(grid.x, grid.across) | {"range": [-0.5, len(grid.across) - 0.5]},
        # Only the first panel labels the rows, because the rows of all panels are the same.
        y_axis=_axis(grid.y, grid.down)
        | {"range": [len(grid.down) - 0.5, -0.5], "showticklabels": first},
    )


def _dots(cell_rows: pd.DataFrame) -> Trace:
    """Return one dot per non-empty cell; it is visible only while a run of the cell is selected."""
    # Plotly cannot select cells of a heat map. A separate point therefore selects the runs of a
    # cell.
    group = cell_rows[cell_rows["runs"].map(len) > 0]
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


def _cells_in_words(cell_rows: pd.DataFrame, name: str) -> str:
    group = cell_rows[cell_rows["runs"].map(len) > 0]
    return f"{title_of(name).capitalize()}: {'; '.join(group['details'] + ': ' + group['text'])}"


def search_history(results: SearchResult) -> Figure:
    """Draw the value of each trial in a search, the best value so far, and parameter importance."""
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
        "Importance of parameters\nimportance computed by Optuna; the sum is 1",
        "share",
        "",
        [bars] if names else [],
        note="no importance: only one parameter, or too few trials",
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
