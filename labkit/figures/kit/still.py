"""Still pictures of figures, which browsers show until, or unless, Plotly draws the figures.

A Plotly figure drawn as a static SVG picture, for notebooks and for pages without scripts.

The picture shows lines, bands, markers, bars, heat maps and parallel coordinates as the page does.
The page describes traces of all other types as text.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import chain, groupby, islice, pairwise
from numbers import Real
from typing import Any

from labkit.figures.kit.entries import INK
from labkit.figures.kit.svg_axes import (
    LEFT,
    MAX_LABEL_LENGTH,
    Axis,
    Point,
    Record,
    area,
    color_of,
    cut,
    dots,
    interpolate,
    is_whole,
    plain_text,
    rectangle,
    stroke,
    text_element,
    values_of,
)

MAX_BARS = 100
# MAX_CELLS is the maximum number of cells of a heat map. MAX_CELLS is also the maximum number of
# bars of a trace.
MAX_CELLS = 10_000
GREYS = [[0.0, "#f0f0f0"], [1.0, "#525252"]]


def marks(trace: Record, all_: Sequence[Record], x: Axis, y: Axis, most: int) -> Iterator[str]:
    """Yield the SVG of one of all traces, with lines reduced to about `most` points."""
    if trace.get("type") == "heatmap":
        yield from _cells(trace, x, y)
        return
    xs, ys = points_of(trace)
    if trace.get("type") == "bar" and len(ys) > MAX_CELLS:
        return
    if trace.get("type") == "bar":
        yield from _bars(trace, all_, xs, ys, x, y)
        yield from _bars_of_spread(trace, xs, ys, x, y)
        return
    pixels = [(x.at(a), y.at(b)) for a, b in zip(xs, ys, strict=False)]
    mode = str(trace.get("mode") or "lines")
    if trace.get("fill") == "tonexty":
        index = next(index for index, other in enumerate(all_) if other is trace)
        previous = zip(*points_of(all_[index - 1]), strict=False)
        previous_pixels = [(x.at(a), y.at(b)) for a, b in previous]
        yield area(
            [*thin(pixels, most), *thin(previous_pixels, most)[::-1]], trace.get("fillcolor")
        )
    elif "lines" in mode:
        yield from _segments(trace.get("line") or {}, pixels, most)
    yield from _bars_of_spread(trace, xs, ys, x, y)
    if "markers" in mode:
        yield from _markers(trace, pixels)
    if "text" in mode:
        for (a, b), text in zip(pixels, values_of(trace.get("text")), strict=False):
            if is_whole((a, b)):
                yield text_element(a, b, str(text), "middle")


def _segments(line: Record, pixels: list[Point], most: int) -> Iterator[str]:
    """Yield the SVG segments of a line, which has gaps where values are missing."""
    width, dash = float(line.get("width", 2)), str(line.get("dash") or "solid")
    points = _step_points(pixels) if line.get("shape") == "hv" else pixels
    for is_finite, segment in groupby(points if width else [], key=is_whole):
        if is_finite:
            yield stroke(thin(list(segment), most), color_of(line.get("color"), 0), width, 1, dash)


def _markers(trace: Record, pixels: Iterable[Point]) -> Iterator[str]:
    marker = trace.get("marker") or {}
    if marker.get("opacity", 1) == 0 or trace.get("opacity", 1) == 0:
        return  # Invisible markers only receive clicks, so a picture omits them.
    symbols = marker.get("symbol") or ""
    groups: dict[tuple[str, bool], list[Point]] = defaultdict(list)
    for number, pixel in enumerate(pixels):
        if is_whole(pixel):
            color = color_of(marker.get("color") or (trace.get("line") or {}).get("color"), number)
            symbol = symbols[number] if isinstance(symbols, list) else symbols
            groups[color, "open" in str(symbol)].append(pixel)
    for (color, is_open), group in groups.items():
        yield dots(group, color, is_open)


def _bars_of_spread(trace: Record, xs: list[Any], ys: list[Any], x: Axis, y: Axis) -> Iterator[str]:
    """Yield error bars, except for a trace with so many points that its error bars would merge."""
    if len(xs) > MAX_BARS:
        return
    for name in ("error_x", "error_y"):
        bars = trace.get(name) or {}
        if not bars.get("visible", True):
            continue
        more, less = (
            values_of(bars.get("array")),
            values_of(bars.get("arrayminus") or bars.get("array")),
        )
        for a, b, up, down in zip(xs, ys, more, less, strict=False):
            low, high = (
                ((a - down, b), (a + up, b)) if name == "error_x" else ((a, b - down), (a, b + up))
            )
            segment = [(x.at(p), y.at(q)) for p, q in (low, high)]
            if all(map(is_whole, segment)):
                yield stroke(segment, color_of(bars.get("color"), 0), 1.5)


def _step_points(pixels: Sequence[Point]) -> list[Point]:
    """Return the corners of a stepped line, which runs horizontally, then vertically."""
    corners = [((a, b), (c, b)) for (a, b), (c, _) in pairwise(pixels)]
    return [*(point for corner in corners for point in corner), *pixels[-1:]]


def _bars(
    trace: Record, all_: Sequence[Record], xs: list[Any], ys: list[Any], x: Axis, y: Axis
) -> Iterator[str]:
    """Yield SVG bars, which begin at zero or at the trace's `base`.

    Bars of several traces at one place stand side by side, unless they have an `offset`.
    """
    is_horizontal = _is_horizontal(trace)
    (along, lengths), (across, positions) = (
        ((x, xs), (y, ys)) if is_horizontal else ((y, ys), (x, xs))
    )
    bars_at: dict[str, list[bool]] = defaultdict(list)
    for other in (candidate for candidate in all_ if candidate.get("type") == "bar"):
        for position in values_of(other.get("y" if is_horizontal else "x")):
            bars_at[str(position)].append(other is trace)
    room = 0.7 * abs(across.last - across.first) / max(1, len(bars_at))
    rows = zip(positions, lengths, _bases(trace, len(lengths)), strict=False)
    for number, (position, length, base) in enumerate(rows):
        bars = [True] if trace.get("offset") is not None else bars_at[str(position)]
        width = min(room, 60.0) / len(bars)
        middle = across.at(position) + width * (bars.index(True) - len(bars) / 2)
        begin = along.at(None if along.is_log and not base else base)
        begin = begin if math.isfinite(begin) else along.first
        end = along.at(base + length if isinstance(length, Real) else length)
        if is_whole((middle, end)):
            low, size = min(begin, end), abs(end - begin)
            box = (low, middle, size, width) if is_horizontal else (middle, low, width, size)
            yield rectangle(*box, color_of((trace.get("marker") or {}).get("color"), number))


def _is_horizontal(trace: Record) -> bool:
    return trace.get("orientation") == "h"


def _bases(trace: Record, count: int) -> list[Any]:
    """Return the value at which each of `count` bars begins."""
    base = 0.0 if trace.get("base") is None else trace["base"]
    return [base] * count if isinstance(base, Real) else values_of(base)


def _placed(traces: Iterable[Record], mode: str) -> Iterator[Record]:
    """Yield traces whose bars have the `base` and `offset` that Plotly's `barmode` gives them."""
    ends: dict[tuple[str, bool], float] = defaultdict(float)
    for trace in traces:
        if trace.get("type") != "bar" or mode == "group":
            yield trace
            continue
        xs, ys = points_of(trace)
        bases = _bases(trace, len(ys))
        if mode in ("stack", "relative"):
            positions, lengths = (ys, xs) if _is_horizontal(trace) else (xs, ys)
            bases = []
            for position, length in zip(positions, lengths, strict=False):
                size = float(length) if isinstance(length, Real) else 0.0
                key = str(position), size < 0  # negative bars are stacked below zero
                bases.append(ends[key])
                ends[key] += size
        yield {**trace, "base": bases, "offset": 0}


def _cells(trace: Record, x: Axis, y: Axis) -> Iterator[str]:
    """Yield the coloured SVG cells of a heat map."""
    rows = [values_of(row) for row in values_of(trace["z"])]
    if sum(map(len, rows)) > MAX_CELLS:
        return
    xs = values_of(trace.get("x")) or list(range(len(rows[0])))
    ys = values_of(trace.get("y")) or list(range(len(rows)))
    finite = [value for row in rows for value in row if value is not None and math.isfinite(value)]
    least, most = min(finite), max(finite)
    scale = trace.get("colorscale")
    scale = scale if isinstance(scale, list) else GREYS
    width, height = (
        abs(axis.last - axis.first) / len(values) for axis, values in ((x, xs), (y, ys))
    )
    texts = [values_of(row) for row in values_of(trace.get("text"))]
    for down, (b, row) in enumerate(zip(ys, rows, strict=False)):
        for across, (a, value) in enumerate(zip(xs, row, strict=False)):
            if value is not None and math.isfinite(value):
                color = interpolate(scale, (value - least) / ((most - least) or 1.0))
                yield rectangle(x.at(a) - width / 2, y.at(b) - height / 2, width, height, color)
                dark = sum(int(color[start : start + 2], 16) for start in (1, 3, 5)) < 384
                text = str(texts[down][across]) if texts else f"{value:.3g}"
                yield text_element(
                    x.at(a), y.at(b) + 4, text, "middle", ink="#fff" if dark else "#000"
                )


def points_of(trace: Record) -> tuple[list[Any], list[Any]]:
    """Return the x and y values of a trace; without x values, x is 0, 1, 2 and so on."""
    ys = values_of(trace.get("y"))
    return (list(range(len(ys))) if trace.get("x") is None else values_of(trace["x"])), ys


def thin(points: list[Point], most: int) -> list[Point]:
    """Return a selection of about `most` points, which includes the first and the last point."""
    finite = [point for point in points if is_whole(point)]
    step = math.ceil(len(finite) / most)
    return finite if step <= 1 else [*finite[:-1:step], finite[-1]]


# The constants WIDTH and RIGHT are the usual width and the right margin of a picture in pixels.
WIDTH, RIGHT = 640.0, 12.0
LINE = 14.0  # The constant LINE is the distance between lines of text in pixels.
LETTER = 5.6  # The constant LETTER is the average width of a character of small text in pixels.
_BREAK = re.compile(r"<br\s*/?>")
# The constant MAX_POINTS is the maximum number of points of all lines in a picture together.
MAX_POINTS = 6_000
# The constant MAX_TRACES is the maximum number of traces in a figure that has a still picture.
MAX_TRACES = 1_000
# The constant MAX_PARTS is the maximum number of SVG elements in a still picture.
MAX_PARTS = 20_000
MAX_LEGEND = 12  # greatest number of legend entries in a picture with a legend


def picture(record: Record, titled: bool = False) -> str:
    """Return an SVG picture of a Plotly figure, whose JSON may be untrusted.

    The result is "" if the figure has no supported trace or has too many elements.

    Args:
        record: JSON of a Plotly figure.
        titled: True for a picture with the figure's own width, title and legend, whose style does
            not depend on the page; False for a picture in a report.
    """
    layout, data = record.get("layout") or {}, record.get("data") or []
    try:
        height = float(layout.get("height") or 450)
        width = float(layout["width"]) if titled else WIDTH
        drawn = _parts(data, layout, width, height)
        elements = chain(_heading(data, layout, width, height), drawn) if titled else drawn
        parts = list(islice(elements, MAX_PARTS + 1))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        # An invalid figure by another author has no picture; the page only describes the figure as
        # text.
        return ""
    if not 0 < len(parts) <= MAX_PARTS:
        return ""
    look = "class='still' aria-hidden='true'"
    if titled:
        style = f"width:100%;max-width:{width:g}px;font:11px system-ui,sans-serif;color:{INK}"
        look = (
            f"role='img' aria-label='{escape(plain_text(layout['title']['text']))}' style='{style}'"
        )
    return f"<svg {look} viewBox='0 0 {width:g} {height:g}'>{''.join(parts)}</svg>"


def image(record: Record) -> str:
    """Return the still picture with title and legend, as a complete SVG file, or ""."""
    svg = picture(record)
    if not svg:
        return ""
    layout = record.get("layout") or {}
    height = float(layout.get("height") or 450)
    words = [
        text_element(LEFT, 2 * LINE, str((layout.get("title") or {}).get("text") or ""), "start")
    ]
    named = [trace for trace in record["data"] if trace.get("showlegend") and trace.get("name")]
    for trace in named[:MAX_LEGEND]:
        height += LINE
        color = color_of((trace.get("line") or trace.get("marker") or {}).get("color"), 0)
        words.append(rectangle(LEFT, height - LINE, LINE / 2, LINE / 2, color))
        words.append(text_element(LEFT + LINE, height - LINE / 2, str(trace["name"]), "start"))
    size = f"width='{WIDTH:g}' height='{height + LINE:g}' viewBox='0 0 {WIDTH:g} {height + LINE:g}'"
    # A picture without a background would be unreadable on a dark page.
    look = "background:#ffffff;color:#57606a;font:11px sans-serif"
    body = svg[svg.index(">") + 1 :].replace("class='hole'", "stroke='#ffffff'")
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} style='{look}'>{''.join(words)}{body}"


def _heading(data: Sequence[Record], layout: Record, width: float, height: float) -> Iterator[str]:
    """Yield the SVG of a figure's title and, below its panels, of its legend."""
    yield text_element(0, 18, layout["title"]["text"], "start", "font-size='15'")
    x, y = 0.0, height - 34
    for trace in data:
        if trace.get("showlegend", True):
            needed = 40 + 7 * len(trace["name"])
            if x + needed > width:
                x, y = 0.0, y + 20
            color = color_of(trace["marker" if trace.get("type") == "bar" else "line"]["color"], 0)
            yield stroke([(x, y - 4), (x + 16, y - 4)], color, 4)
            yield text_element(x + 21, y, trace["name"], "start", "font-size='12'")
            x += needed


def _parts(data: Sequence[Record], layout: Record, width: float, height: float) -> Iterator[str]:
    """Yield the SVG elements of all panels, each of which has one pair of axes with its traces."""
    if any(trace.get("type") == "parcoords" for trace in data):
        yield from _parallel(data[0], height)
        return
    margin = layout.get("margin") or {}
    top, below = float(margin.get("t", 40)), float(margin.get("b", 50))

    drawn = [trace for trace in data if trace.get("visible", True) is True and _is_supported(trace)]
    if len(drawn) > MAX_TRACES:
        return
    pairs = sorted(drawn, key=_axes)
    most_points = max(2, MAX_POINTS // max(1, len(drawn)))
    # The set `panel_starts` contains the left ends of panels, including axis labels, in pixels.
    panel_starts = {width}
    for (x_name, y_name), traces in groupby(pairs, key=_axes):
        panel_traces = list(_placed(traces, str(layout.get("barmode") or "group")))
        x_look = layout.get(f"xaxis{x_name[1:]}") or {}
        y_look = layout.get(f"yaxis{y_name[1:]}") or {}
        (left, right), (low, high) = (look.get("domain") or (0, 1) for look in (x_look, y_look))
        inner_width, inner_height = width - LEFT - RIGHT, height - top - below
        y = Axis(
            y_look,
            _values(panel_traces, "y"),
            top + (1 - low) * inner_height,
            top + (1 - high) * inner_height,
        )
        axis_start = LEFT + left * inner_width if left else y.room
        x = Axis(x_look, _values(panel_traces, "x"), axis_start, LEFT + right * inner_width)
        panel_starts.add(axis_start - y.room)
        yield from _frame(x, y)
        for trace in panel_traces:
            yield from marks(trace, panel_traces, x, y, most_points)
    for note in layout.get("annotations") or []:
        if note.get("xref") == note.get("yref") == "paper" and note.get("text"):
            x_pixel = LEFT + float(note["x"]) * (width - LEFT - RIGHT)
            y_pixel = top + (1 - float(note["y"])) * (height - top - below)
            anchor = {"center": "middle", "right": "end"}.get(str(note.get("xanchor")), "start")
            lines = _BREAK.split(note["text"])
            # A left-aligned annotation must end before the next panel begins, so its lines are cut.
            if anchor == "start":
                room = (
                    min((start for start in panel_starts if start > x_pixel), default=width)
                    - x_pixel
                )
                lines = [cut(line, int(room / LETTER)) for line in lines]
            # For a Plotly annotation with `yanchor` "top", the position means the first text line.
            # The position of a Plotly annotation with another `yanchor` is the position of its last
            # line of text.
            lines_above = 0 if note.get("yanchor") == "top" else len(lines) - 1
            for number, line in enumerate(lines):
                shift = LINE * (lines_above - number) + float(note.get("yshift") or 0)
                yield text_element(x_pixel, y_pixel - shift, line, anchor)


def _is_supported(trace: Record) -> bool:
    kind = trace.get("type") or "scatter"
    return kind == "heatmap" or (kind in ("scatter", "scattergl", "bar") and "y" in trace)


def _axes(trace: Record) -> tuple[str, str]:
    return str(trace.get("xaxis") or "x"), str(trace.get("yaxis") or "y")


def _frame(x: Axis, y: Axis) -> Iterator[str]:
    """Yield the SVG of the two axes of a panel, with ticks and titles."""
    if x.look.get("visible") is not False:
        yield stroke([(x.first, y.first), (x.last, y.first)], "currentColor", 1)
        room = (x.last - x.first) / max(1, len(list(x.ticks())))
        for pixel, text in x.ticks() if x.look.get("showticklabels", True) else ():
            yield text_element(pixel, y.first + 14, cut(text, int(room / 6)), "middle")
        yield text_element((x.first + x.last) / 2, y.first + 32, x.title, "middle")
    if y.look.get("visible") is not False:
        yield stroke([(x.first, y.first), (x.first, y.last)], "currentColor", 1)
        for pixel, text in y.ticks():
            yield stroke([(x.first, pixel), (x.last, pixel)], "currentColor", 1, 0.15)
            if y.look.get("showticklabels", True):
                yield text_element(x.first - 5, pixel + 4, cut(text, MAX_LABEL_LENGTH), "end")
        middle, title_x = (y.first + y.last) / 2, x.first - y.room + 12
        rotation = f"transform='rotate(-90 {title_x:.1f} {middle:.1f})'"
        yield text_element(title_x, middle, y.title, "middle", rotation)


def _parallel(trace: Record, height: float) -> Iterator[str]:
    """Yield SVG for parallel coordinates: an axis per parameter or result, and a line per run."""
    dimensions = [dimension for dimension in trace["dimensions"] if dimension.get("visible", True)]
    step = (WIDTH - 2 * LEFT) / max(1, len(dimensions) - 1)
    axes = []
    for index, look in enumerate(dimensions):
        values = values_of(look["values"])
        axes.append((LEFT + index * step, Axis(look, values, height - 20, 50), values))
        x_pixel, axis, _ = axes[-1]
        yield stroke([(x_pixel, axis.first), (x_pixel, axis.last)], "currentColor", 1)
        yield text_element(x_pixel, 22 + 14 * (index % 2), str(look.get("label") or ""), "middle")
        for tick_y, text in axis.ticks():
            yield text_element(x_pixel + 4, tick_y + 4, cut(text, 12), "start")
    for run in range(len(axes[0][2])):
        points = [(x_pixel, axis.at(values[run])) for x_pixel, axis, values in axes]
        yield stroke([point for point in points if is_whole(point)], "#0072B2", 1.5, 0.7)


def _values(traces: Iterable[Record], name: str) -> list[Any]:
    """Return all values of the traces on the x or y axis, including both ends of bars."""
    values: list[Any] = []
    for trace in traces:
        axis_values = points_of(trace)[name == "y"]
        if trace.get("type") == "bar" and (name == "x") == _is_horizontal(trace):
            bases = _bases(trace, len(axis_values))
            pairs = zip(bases, axis_values, strict=False)
            axis_values = [b + v if isinstance(v, Real) else v for b, v in pairs]
            values += bases
        errors = values_of((trace.get(f"error_{name}") or {}).get("array"))
        pairs = zip(axis_values, errors, strict=False)
        values += axis_values + [
            a + more for a, more in pairs if isinstance(a, Real) and isinstance(more, Real)
        ]
    return values


__all__ = ["picture"]
