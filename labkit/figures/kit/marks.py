"""Plotly traces from tidy tables: lines with bands, points with whiskers, bars, heat maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from labkit.figures.kit.entries import INK, LineStyle, RunEntry, transparent
from labkit.figures.kit.panels import Panel, Trace

if TYPE_CHECKING:
    import pandas as pd

Looks = Mapping[str, RunEntry | LineStyle]
QUIET = {"hoverinfo": "skip", "showlegend": False}
_FEW = 20  # columns with more than `_FEW` values are stored in single precision
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
    """Return a line for each group of rows, with a band for the spread of y.

    Args:
        table: Table with the columns x and y, and optionally the ends of the spread, `<y>_low` and
            `<y>_high`.
        x, y: Names of the columns to draw.
        looks: Line style for each value of the column `by`.
        by: Column that groups rows into lines.
        marks: Whether each point has a marker; a line with only one point always has a marker.
        faint: Column that is drawn as a faint line, such as unsmoothed values, if there is no band.
        changes: Further Plotly keys of the line traces.
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
    look: RunEntry | LineStyle,
    *,
    marks: bool = False,
    faint: str = "",
    **changes: str | bool,
) -> list[Trace]:
    """Return the line for one group of rows, and a band that shows the spread of y."""
    return [
        *_band_or_faint_line(group, x, y, look, faint),
        _line(group, x, y, look, marks) | changes,
    ]


def points_with_bars(
    table: pd.DataFrame, x: str, y: str, looks: Looks, *, by: str = "run", size: int = 10
) -> list[Trace]:
    """Return a marker for each row, with error bars for the spread in x and in y.

    Rows whose column `open` is true get an open marker.
    """
    drawn = []
    for name, rows in _rows_by(table, by).items():
        look = looks[name]
        # Each row is a separate trace, because a legend entry or a click selects whole traces.
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
    """Return bars, one trace per style, with whiskers that show the spread of the lengths.

    Hatches distinguish bars when colours repeat. If `horizontal` is true, x is the length of a bar
    and y its position.
    """
    # `length` names the column with the lengths of the bars; whiskers show the spread of this
    # column.
    length = x if horizontal else y
    drawn = []
    for name, rows in _rows_by(table, by).items():
        look, group = looks[name], {column: [row[column] for row in rows] for column in rows[0]}
        # A bar cannot show the dash of its line style, so a hatch replaces the dash.
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


def points(
    table: pd.DataFrame, x: str, y: str, look: RunEntry | LineStyle, *, size: int = 8
) -> Trace:
    """Return all rows as one trace of markers, with error bars that show the spread of y."""
    marker = {"color": look.color, "symbol": look.symbol, "size": size}
    trace: Trace = {"x": list(table[x]), "y": list(table[y]), "mode": "markers", "marker": marker}
    if f"{y}_low" in table:
        trace["error_y"] = whisker(table[y], table[f"{y}_low"], table[f"{y}_high"], look.color)
    if "hover" in table:
        trace |= {"text": list(table["hover"]), "hovertemplate": "%{text}"}
    return trace | {"showlegend": False} | look.style


def curve(
    x: Sequence[float],
    y: Sequence[float],
    look: RunEntry | LineStyle,
    width: float = 1,
    **details: object,
) -> Trace:
    """Return a line through calculated values; `details` are further Plotly keys of the line."""
    line = {"color": look.color, "dash": look.dash, "width": width}
    return {"x": x, "y": y, "mode": "lines", "line": line} | QUIET | look.style | details


def crosses(
    x: Sequence[float], y: Sequence[float], texts: Sequence[str], place: str, **details: object
) -> Trace:
    """Return crosses with texts, which mark points where a result changes."""
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
    """Return a table's texts at their positions, in the text colour of the page."""
    places = {"x": list(table[x]), "y": list(table[y]), "text": list(table[text])}
    return places | {"mode": "text", "textfont": {"size": size, "color": INK}} | QUIET | changes


def rule(x: Sequence[float | None], y: Sequence[float | None], dash: str = "solid") -> Trace:
    """Return a thin line that represents no run, such as an ideal, a Pareto front or an axis."""
    return {
        "x": x,
        "y": y,
        "mode": "lines",
        "line": {"color": INK, "dash": dash, "width": 1},
    } | QUIET


def whisker(
    middle: Sequence[float], low: Sequence[float], high: Sequence[float], color: str
) -> Trace:
    """Return error bars from `low` to `high`; if both are equal, the bars are invisible."""
    least, value, most = (np.asarray(values, float) for values in (low, middle, high))
    return {
        "array": np.maximum(most - value, 0).tolist(),
        # Rounding may place a mean outside its range, but Plotly needs whisker lengths of at least
        # 0.
        "arrayminus": np.maximum(value - least, 0).tolist(),
        "symmetric": False,
        "color": color,
        "thickness": 1.5,
        "visible": bool((most > least).any()),
    }


def _groups(
    table: pd.DataFrame, looks: Looks, by: str
) -> Iterator[tuple[RunEntry | LineStyle, pd.DataFrame]]:
    for name, group in table.groupby(by, sort=False):
        yield looks[name], group


def _rows_by(table: pd.DataFrame, by: str) -> dict[str, list[Trace]]:
    """Group rows by a column, faster than pandas does for thousands of single-row groups."""
    results: dict[str, list[Trace]] = {}
    for row in table.to_dict("records"):
        results.setdefault(row[by], []).append(row)
    return results


def _line(group: pd.DataFrame, x: str, y: str, look: RunEntry | LineStyle, marks: bool) -> Trace:
    marker = {"color": look.color, "symbol": look.symbol, "size": 7}
    line = {"color": look.color, "dash": look.dash, "width": 2}
    trace = {"x": _thin(group[x]), "y": _thin(group[y]), "showlegend": False} | look.style
    if len(group) == 1:
        return trace | {"mode": "markers", "marker": marker}
    if marks:
        return trace | {"mode": "lines+markers", "line": line, "marker": marker}
    return trace | {"mode": "lines", "line": line}


def _band_or_faint_line(
    group: pd.DataFrame, x: str, y: str, look: RunEntry | LineStyle, faint: str
) -> list[Trace]:
    """Return the band between the limits of y, or the faint line if the values have no spread."""
    quiet = {"x": _thin(group[x]), "mode": "lines"} | QUIET | look.style
    low, high = f"{y}_low", f"{y}_high"
    # A band of width zero is not drawn, because it would be an invisible trace with hover text.
    if low in group and not group[low].equals(group[high]):
        # The filled area of the band lies between two invisible lines.
        fill = {"fill": "tonexty", "fillcolor": transparent(look.color, 0.2)}
        edges = [quiet | {"line": {"width": 0}, "y": _thin(group[end])} for end in (low, high)]
        return [edges[0], edges[1] | fill]
    line = {"color": transparent(look.color, 0.3), "width": 1}
    return [quiet | {"y": _thin(group[faint]), "line": line}] if faint else []


def _thin(values: pd.Series) -> np.ndarray:
    """Convert long columns to single precision; figures show fewer than six digits."""
    return np.asarray(values, np.float32 if len(values) > _FEW else float)


# A colour scale lists colours by position, from 0 (least value) to 1 (greatest value).
Scale = list[tuple[float, str]]


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
    """Return a heat map of a table, with row and column names on the axes.

    Args:
        values: Values of the table, shape (rows, columns).
        x, y: Names or bin edges of the columns (x) and of the rows (y). By default, columns and
            rows are numbered from 0.
        colors: Colour scale for values from 0 to `most`; default: the figure's colour axis.
        most: Value at the upper end of the colour scale.
        hover: Plotly template of the hover text; default: no hover text.
        gap: Width of the gaps between cells in pixels.
        texts: Text of each cell, by row and column; default: no texts.
        letters: Font size of the texts in pixels.
        on: Plotly keys of the axes; default: the first axes.
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
    """Return a panel with a matrix of amounts from senders (rows) to receivers (columns).

    Args:
        title: Title of the panel.
        names: Names of the processes, each of which is a sender and a receiver.
        values: Sent amounts, shape (senders, receivers).
        texts: Function that formats an amount.
        verb: Words between sender and receiver in the hover text, such as "sends to".
        axes: Titles of the x and the y axis.
        letters: Font size of the texts in pixels.
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
    """Return the trace of one part of stacked bars; each part has a different hatch."""
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
    """Return a colour scale from transparent to a colour, given as RGB text "213,94,0"."""
    # The low end of the scale is transparent, so that it shows the page's colour, light or dark.
    return [(0, f"rgba({color},0)"), (1, f"rgba({color},{alpha})")]


def step_colors(colors: Sequence[str]) -> Scale:
    """Return a colour scale in steps: one constant colour around each of the values 0, 1, 2, …."""
    last = len(colors) - 1
    return [
        (min(max((step + side) / last, 0.0), 1.0), color)
        for step, color in enumerate(colors)
        for side in (-0.5, 0.5)
    ]
