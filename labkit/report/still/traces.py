"""Traces of a still picture: lines, bands, markers, bars, cells."""

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
    between,
    color_of,
    dots,
    is_whole,
    rectangle,
    stroke,
    words,
)

MOST_BARS = 100
MOST_CELLS = 10_000  # of a table, and bars of a trace
GREYS = [[0.0, "#f0f0f0"], [1.0, "#525252"]]


def marks(trace: Record, all_: Sequence[Record], x: Axis, y: Axis, most: int) -> Iterator[str]:
    """A trace among all of its axes; its line has at most about so many points."""
    if trace.get("type") == "heatmap":
        yield from _cells(trace, x, y)
        return
    xs, ys = points_of(trace)
    if trace.get("type") == "bar" and len(ys) > MOST_CELLS:
        return
    if trace.get("type") == "bar":
        yield from _bars(trace, all_, xs, ys, x, y)
        yield from _bars_of_spread(trace, xs, ys, x, y)
        return
    places = [(x.at(a), y.at(b)) for a, b in zip(xs, ys, strict=False)]
    mode = str(trace.get("mode") or "lines")
    if trace.get("fill") == "tonexty":
        own = next(place for place, each in enumerate(all_) if each is trace)
        before = zip(*points_of(all_[own - 1]), strict=False)
        back = [(x.at(a), y.at(b)) for a, b in before]
        yield area([*thin(places, most), *thin(back, most)[::-1]], trace.get("fillcolor"))
    elif "lines" in mode:
        yield from _stretches(trace.get("line") or {}, places, most)
    yield from _bars_of_spread(trace, xs, ys, x, y)
    if "markers" in mode:
        yield from _markers(trace, places)
    if "text" in mode:
        for (a, b), text in zip(places, values_of(trace.get("text")), strict=False):
            if is_whole((a, b)):
                yield words(a, b, str(text), "middle")


def _stretches(line: Record, places: list[Point], most: int) -> Iterator[str]:
    """A line, with a gap where a value is missing."""
    width, dash = float(line.get("width", 2)), str(line.get("dash") or "solid")
    cornered = _cornered(places) if line.get("shape") == "hv" else places
    for whole, stretch in groupby(cornered if width else [], key=is_whole):
        if whole:
            yield stroke(thin(list(stretch), most), color_of(line.get("color"), 0), width, 1, dash)


def _markers(trace: Record, places: Iterable[Point]) -> Iterator[str]:
    marker = trace.get("marker") or {}
    if marker.get("opacity", 1) == 0 or trace.get("opacity", 1) == 0:
        return  # only there to be clicked
    symbols = marker.get("symbol") or ""
    found: dict[tuple[str, bool], list[Point]] = defaultdict(list)
    for number, place in enumerate(places):
        if is_whole(place):
            color = color_of(marker.get("color") or (trace.get("line") or {}).get("color"), number)
            symbol = symbols[number] if isinstance(symbols, list) else symbols
            found[color, "open" in str(symbol)].append(place)
    for (color, is_open), own in found.items():
        yield dots(own, color, is_open)


def _bars_of_spread(trace: Record, xs: list[Any], ys: list[Any], x: Axis, y: Axis) -> Iterator[str]:
    """The lines through points from their least to their greatest values; of many they are fog."""
    if len(xs) > MOST_BARS:
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
            ends = [(x.at(p), y.at(q)) for p, q in (low, high)]
            if all(map(is_whole, ends)):
                yield stroke(ends, color_of(bars.get("color"), 0), 1.5)


def _cornered(places: Sequence[Point]) -> list[Point]:
    """A line that goes across before it goes up."""
    corners = [((a, b), (c, b)) for (a, b), (c, _) in pairwise(places)]
    return [*(point for corner in corners for point in corner), *places[-1:]]


def _bars(
    trace: Record, all_: Sequence[Record], xs: list[Any], ys: list[Any], x: Axis, y: Axis
) -> Iterator[str]:
    """Bars from nothing; of several at one place, beside each other."""
    lies = trace.get("orientation") == "h"
    (along, lengths), (across, places) = ((x, xs), (y, ys)) if lies else ((y, ys), (x, xs))
    at: dict[str, list[bool]] = defaultdict(list)
    for other in (each for each in all_ if each.get("type") == "bar"):
        for place in values_of(other.get("y" if lies else "x")):
            at[str(place)].append(other is trace)
    room = 0.7 * abs(across.last - across.first) / max(1, len(at))
    begin = along.at(None if along.is_log else 0.0)
    begin = begin if math.isfinite(begin) else along.first
    for number, (place, length) in enumerate(zip(places, lengths, strict=False)):
        beside = at[str(place)]
        width = min(room, 60.0) / len(beside)
        middle = across.at(place) + width * (beside.index(True) - len(beside) / 2)
        end = along.at(length)
        if is_whole((middle, end)):
            low, size = min(begin, end), abs(end - begin)
            box = (low, middle, size, width) if lies else (middle, low, width, size)
            yield rectangle(*box, color_of((trace.get("marker") or {}).get("color"), number))


def _cells(trace: Record, x: Axis, y: Axis) -> Iterator[str]:
    """The cells of a table of numbers, by their colour."""
    rows = [values_of(row) for row in values_of(trace["z"])]
    if sum(map(len, rows)) > MOST_CELLS:
        return
    xs = values_of(trace.get("x")) or list(range(len(rows[0])))
    ys = values_of(trace.get("y")) or list(range(len(rows)))
    known = [value for row in rows for value in row if value is not None and math.isfinite(value)]
    least, most = min(known), max(known)
    scale = trace.get("colorscale")
    scale = scale if isinstance(scale, list) else GREYS
    width, height = (abs(axis.last - axis.first) / len(own) for axis, own in ((x, xs), (y, ys)))
    texts = [values_of(row) for row in values_of(trace.get("text"))]
    for down, (b, row) in enumerate(zip(ys, rows, strict=False)):
        for across, (a, value) in enumerate(zip(xs, row, strict=False)):
            if value is not None and math.isfinite(value):
                color = between(scale, (value - least) / ((most - least) or 1.0))
                yield rectangle(x.at(a) - width / 2, y.at(b) - height / 2, width, height, color)
                dark = sum(int(color[each : each + 2], 16) for each in (1, 3, 5)) < 384
                said = str(texts[down][across]) if texts else f"{value:.3g}"
                yield words(x.at(a), y.at(b) + 4, said, "middle", ink="#fff" if dark else "#000")


def points_of(trace: Record) -> tuple[list[Any], list[Any]]:
    """What stands where; without places, one after the other."""
    ys = values_of(trace.get("y"))
    return (list(range(len(ys))) if trace.get("x") is None else values_of(trace["x"])), ys


def thin(points: list[Point], most: int) -> list[Point]:
    """At most about so many points, the first and the last among them."""
    known = [point for point in points if is_whole(point)]
    step = math.ceil(len(known) / most)
    return known if step <= 1 else [*known[:-1:step], known[-1]]
