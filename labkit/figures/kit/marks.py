"""Marks drawn from tidy tables: lines with bands, points with whiskers, bars, cells and text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from labkit.figures.kit.entries import INK, Entry, Line, transparent
from labkit.figures.kit.panels import Panel, Trace

if TYPE_CHECKING:
    import pandas as pd

Looks = Mapping[str, Entry | Line]
QUIET = {"hoverinfo": "skip", "showlegend": False}
_FEW = 20  # values that are kept as they are
_HATCHES = {"solid": "", "dash": "/", "dot": ".", "dashdot": "x"}


def line_with_band(
    table: pd.DataFrame,
    x: str,
    y: str,
    looks: Looks,
    *,
    by: str = "run",
    marks: bool = False,
    faint: str = "",
    **changes: str | bool,
) -> list[Trace]:
    """Return a line for each group of rows, over the band of its spread.

    Args:
        table: with columns x, y and, where there is a spread, `<y>_low` and `<y>_high`.
        x, y: columns.
        looks: by the values of the column `by`.
        by: whose rows make a line.
        marks: a marker at each point, too. A line of one point is not seen: it is a marker always.
        faint: a column to draw lightly instead of a band, such as the unsmoothed values.
        changes: to the lines' traces.
    """
    return [
        trace
        for look, group in _groups(table, looks, by)
        for trace in line_over_band(group, x, y, look, marks=marks, faint=faint, **changes)
    ]


def line_over_band(
    group: pd.DataFrame,
    x: str,
    y: str,
    look: Entry | Line,
    *,
    marks: bool = False,
    faint: str = "",
    **changes: str | bool,
) -> list[Trace]:
    """Return the line of one group of rows, over the band of its spread."""
    return [*_under(group, x, y, look, faint), _line(group, x, y, look, marks) | changes]


def points_with_bars(
    table: pd.DataFrame, x: str, y: str, looks: Looks, *, by: str = "run", size: int = 10
) -> list[Trace]:
    """Return a marker a row, with bars over its spread in x and in y.

    Rows whose column `open` is true get an open marker.
    """
    drawn = []
    for name, rows in _rows_by(table, by).items():
        look = looks[name]
        # A trace a row, since markers of one trace have their run in common.
        for row in rows:
            symbol = f"{look.symbol}-open" if row.get("open") else look.symbol
            outline = {"width": 2, "color": look.color}
            marker = {"color": look.color, "symbol": symbol, "size": size, "line": outline}
            trace: Trace = {"x": [row[x]], "y": [row[y]], "mode": "markers", "marker": marker}
            for axis, column in (("error_x", x), ("error_y", y)):
                if f"{column}_low" in row:
                    ends = (row[f"{column}_low"], row[f"{column}_high"])
                    trace[axis] = whisker([row[column]], ends[:1], ends[1:], look.color)
            hover = {"hovertemplate": row.get("hover"), "showlegend": False}
            drawn.append(trace | hover | look.style)
    return drawn


def bars(
    table: pd.DataFrame, x: str, y: str, looks: Looks, *, by: str = "run", horizontal: bool = False
) -> list[Trace]:
    """Return bars, one trace a look, with whiskers over the spread of their lengths.

    Hatches tell them apart where colours come round again. horizontal: x is the length, y the
    place.
    """
    # The column along which bars reach, and so the one that has a spread.
    length = x if horizontal else y
    drawn = []
    for name, rows in _rows_by(table, by).items():
        look, group = looks[name], {column: [row[column] for row in rows] for column in rows[0]}
        # Bars have no dash: what a line shows by it, a bar shows by its hatch.
        pattern = {"shape": _HATCHES[look.dash]}
        trace: Trace = {"type": "bar", "x": group[x], "y": group[y]}
        trace |= {"marker": {"color": look.color, "pattern": pattern}, "showlegend": False}
        if horizontal:
            trace["orientation"] = "h"
        if f"{length}_low" in group:
            spread = whisker(group[length], group[f"{length}_low"], group[f"{length}_high"], INK)
            trace["error_x" if horizontal else "error_y"] = spread
        if "hover" in group:
            trace |= {"hovertext": group["hover"], "hovertemplate": "%{hovertext}"}
        drawn.append(trace | look.style)
    return drawn


def points(table: pd.DataFrame, x: str, y: str, look: Entry | Line, *, size: int = 8) -> Trace:
    """Return the rows of one look as markers with bars over the spread of y, as one trace."""
    marker = {"color": look.color, "symbol": look.symbol, "size": size}
    trace: Trace = {"x": list(table[x]), "y": list(table[y]), "mode": "markers", "marker": marker}
    if f"{y}_low" in table:
        trace["error_y"] = whisker(table[y], table[f"{y}_low"], table[f"{y}_high"], look.color)
    if "hover" in table:
        trace |= {"text": list(table["hover"]), "hovertemplate": "%{text}"}
    return trace | {"showlegend": False} | look.style


def curve(
    x: Sequence[float], y: Sequence[float], look: Entry | Line, width: float = 1, **details: object
) -> Trace:
    """Return a line through calculated values, with an optional hover text."""
    line = {"color": look.color, "dash": look.dash, "width": width}
    return {"x": x, "y": y, "mode": "lines", "line": line} | QUIET | look.style | details


def crosses(
    x: Sequence[float], y: Sequence[float], texts: Sequence[str], place: str, **details: object
) -> Trace:
    """Return crosses with texts where something changes."""
    return (
        {
            "x": x,
            "y": y,
            "mode": "markers+text",
            "marker": {"symbol": "x-thin", "size": 13, "line": {"color": INK, "width": 3}},
            "text": texts,
            "textposition": place,
            "textfont": {"size": 12, "color": INK},
        }
        | QUIET
        | details
    )


def words(
    table: pd.DataFrame, x: str, y: str, text: str = "text", *, size: int = 11, **changes: str
) -> Trace:
    """Return texts at places, in the ink of the page."""
    places = {"x": list(table[x]), "y": list(table[y]), "text": list(table[text])}
    return places | {"mode": "text", "textfont": {"size": size, "color": INK}} | QUIET | changes


def rule(x: Sequence[float | None], y: Sequence[float | None], dash: str = "solid") -> Trace:
    """Return a thin line that belongs to no run: an ideal, a front, an axis."""
    return {
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": INK, "dash": dash, "width": 1},
    } | QUIET


def whisker(
    middle: Sequence[float], low: Sequence[float], high: Sequence[float], color: str
) -> Trace:
    """Return bars from the least to the greatest value, invisible without a spread."""
    least, value, most = (np.asarray(each, float) for each in (low, middle, high))
    return {
        "array": np.maximum(most - value, 0).tolist(),
        # Rounding may put a mean a little beyond its ends; Plotly wants lengths.
        "arrayminus": np.maximum(value - least, 0).tolist(),
        "symmetric": False,
        "color": color,
        "thickness": 1.5,
        "visible": bool((most > least).any()),
    }


def _groups(
    table: pd.DataFrame, looks: Looks, by: str
) -> Iterator[tuple[Entry | Line, pd.DataFrame]]:
    for name, group in table.groupby(by, sort=False):
        yield looks[name], group


def _rows_by(table: pd.DataFrame, by: str) -> dict[str, list[Trace]]:
    """Return rows by group, faster than pandas for thousands of runs with one row each."""
    results: dict[str, list[Trace]] = {}
    for row in table.to_dict("records"):
        results.setdefault(row[by], []).append(row)
    return results


def _line(group: pd.DataFrame, x: str, y: str, look: Entry | Line, marks: bool) -> Trace:
    marker = {"color": look.color, "symbol": look.symbol, "size": 7}
    line = {"color": look.color, "dash": look.dash, "width": 2}
    trace = {"x": _thin(group[x]), "y": _thin(group[y]), "showlegend": False} | look.style
    if len(group) == 1:
        return trace | {"mode": "markers", "marker": marker}
    if marks:
        return trace | {"mode": "lines+markers", "line": line, "marker": marker}
    return trace | {"mode": "lines", "line": line}


def _under(group: pd.DataFrame, x: str, y: str, look: Entry | Line, faint: str) -> list[Trace]:
    """Return the band between the least and the greatest value, or else the faint line."""
    quiet = {"x": _thin(group[x]), "mode": "lines"} | QUIET | look.style
    low, high = f"{y}_low", f"{y}_high"
    # A band of no width would be an invisible trace that still answers to the pointer.
    if low in group and not group[low].equals(group[high]):
        # Two lines of no width, and the colour between them.
        fill = {"fill": "tonexty", "fillcolor": transparent(look.color, 0.2)}
        edges = [quiet | {"line": {"width": 0}, "y": _thin(group[each])} for each in (low, high)]
        return [edges[0], edges[1] | fill]
    line = {"color": transparent(look.color, 0.3), "width": 1}
    return [quiet | {"y": _thin(group[faint]), "line": line}] if faint else []


def _thin(values: pd.Series) -> np.ndarray:
    """Keep half the digits of many values, because a figure shows fewer than six."""
    return np.asarray(values, np.float32 if len(values) > _FEW else float)


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
    """Return cells of a table, by names of rows and columns or between edges.

    Args:
        values: shape (rows, columns); x, y: names, or edges, of columns and rows; None: numbers.
        colors: from the least value, 0, to `most`; None: those of the figure's own colour axis.
        hover: a template of Plotly; "": no hover text.
        texts: of the cells; letters: their size.
        gap: pixels between cells; on: the axes, where they are not the first ones.
    """
    scale: Trace = {"coloraxis": "coloraxis"}
    if colors is not None:
        scale = {"colorscale": colors, "zmin": 0, "zmax": most, "showscale": False}
    details: Trace = (
        {"hovertemplate": f"{hover}<extra></extra>"} if hover else {"hoverinfo": "skip"}
    )
    place = {name: edges for name, edges in (("x", x), ("y", y)) if edges is not None}
    between = {"xgap": gap, "ygap": gap}
    text: Trace = {"text": texts, "texttemplate": "%{text}"} if texts else {}
    text |= {"textfont": {"color": INK, "size": letters}} if texts else {}
    return {"type": "heatmap", "z": values} | place | scale | details | between | text | (on or {})


def matrix_panel(
    title: str,
    names: Sequence[str],
    values: NDArray[Any],
    texts: Callable[[Any], str],
    verb: str,
    axes: tuple[str, str],
    letters: int = 12,
) -> Panel:
    """Return a matrix of senders (rows) and receivers (columns), with the amounts in its cells.

    Args:
        title: of the panel; axes: titles of x and y.
        names: of senders and receivers; values: shape (senders, receivers).
        texts: formats an amount; verb: the hover text between sender and receiver.
        letters: size of the texts.
    """
    heat = cells(
        values,
        names,
        names,
        fade_to("213,94,0", 0.3),
        max(1, values.max()),
        f"%{{y}} {verb} %{{x}}",
        gap=1,
        texts=[[texts(value) if value else "·" for value in row] for row in values.tolist()],
        letters=letters,
    )
    plain = {"type": "category", "showgrid": False, "nticks": len(names)}
    return Panel(title, *axes, [heat], x_axis=plain, y_axis=plain | {"autorange": "reversed"})


def part_bars(
    x: Any, y: Any, name: str, color: str, hatch: str, hover: str, **changes: object
) -> Trace:
    """Return the bars of one part of stacked bars; its hatch tells it apart without colour."""
    return {
        "type": "bar",
        "x": x,
        "y": y,
        "marker": {"color": color, "pattern": {"shape": hatch, "fillmode": "overlay"}},
        "hovertemplate": f"{hover}<extra></extra>",
        "name": name,
        "legendgroup": name,
        "showlegend": False,
    } | changes


def fade_to(color: str, alpha: float = 1.0) -> Scale:
    """Return colours from clear to this one ("213,94,0"), pale enough for legible text."""
    # Clear at the low end, so that the page's own colour shows: light or dark.
    return [(0, f"rgba({color},0)"), (1, f"rgba({color},{alpha})")]


def step_colors(colors: Sequence[str]) -> Scale:
    """Return a colour for each of the values 0, 1, 2, …, half a step to both sides."""
    last = len(colors) - 1
    return [
        (min(max((step + side) / last, 0.0), 1.0), color)
        for step, color in enumerate(colors)
        for side in (-0.5, 0.5)
    ]
