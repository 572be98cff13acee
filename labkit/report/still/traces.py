"""Traces of a still picture: lines, bands, markers, bars and cells."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from labkit.report.still.axis import Axis, Record, values_of
from labkit.report.still.svg import (
    Point,
    area,
    color_of,
    dots,
    interpolate,
    is_whole,
    rectangle,
    stroke,
    text_element,
)

MAX_BARS = 100
MAX_CELLS = 10_000  # greatest number of cells of a heat map, and of bars of a trace
GREYS = [[0.0, "#f0f0f0"], [1.0, "#525252"]]


def marks(trace: Record, all_: Sequence[Record], x: Axis, y: Axis, most: int) -> Iterator[str]:
    """Yield the SVG of one trace; lines are reduced to about `most` points."""
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
        return  # the trace has invisible markers that only receive clicks
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
    """Yield error bars; a trace with too many points has none, because they would merge."""
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
    """Return the corners of a stepped line, which goes horizontally, then vertically to a point."""
    corners = [((a, b), (c, b)) for (a, b), (c, _) in pairwise(pixels)]
    return [*(point for corner in corners for point in corner), *pixels[-1:]]


def _bars(
    trace: Record, all_: Sequence[Record], xs: list[Any], ys: list[Any], x: Axis, y: Axis
) -> Iterator[str]:
    """Yield SVG bars that start at zero; bars of several traces at one x stand side by side."""
    is_horizontal = trace.get("orientation") == "h"
    (along, lengths), (across, positions) = (
        ((x, xs), (y, ys)) if is_horizontal else ((y, ys), (x, xs))
    )
    bars_at: dict[str, list[bool]] = defaultdict(list)
    for other in (candidate for candidate in all_ if candidate.get("type") == "bar"):
        for position in values_of(other.get("y" if is_horizontal else "x")):
            bars_at[str(position)].append(other is trace)
    room = 0.7 * abs(across.last - across.first) / max(1, len(bars_at))
    zero = along.at(None if along.is_log else 0.0)
    zero = zero if math.isfinite(zero) else along.first
    for number, (position, length) in enumerate(zip(positions, lengths, strict=False)):
        bars = bars_at[str(position)]
        width = min(room, 60.0) / len(bars)
        middle = across.at(position) + width * (bars.index(True) - len(bars) / 2)
        end = along.at(length)
        if is_whole((middle, end)):
            low, size = min(zero, end), abs(end - zero)
            box = (low, middle, size, width) if is_horizontal else (middle, low, width, size)
            yield rectangle(*box, color_of((trace.get("marker") or {}).get("color"), number))


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
    """Return the x and y values of a trace; if it has no x values, x counts from 0."""
    ys = values_of(trace.get("y"))
    return (list(range(len(ys))) if trace.get("x") is None else values_of(trace["x"])), ys


def thin(points: list[Point], most: int) -> list[Point]:
    """Return a selection of about `most` points, which includes the first and the last point."""
    finite = [point for point in points if is_whole(point)]
    step = math.ceil(len(finite) / most)
    return finite if step <= 1 else [*finite[:-1:step], finite[-1]]
