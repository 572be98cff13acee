"""A Plotly figure drawn as a static SVG picture, for pages that may not run scripts.

The picture shows lines, bands, markers, bars, heat maps and parallel coordinates as the page does.
Traces of all other types have no picture; the page describes such traces as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from labkit.common.canonical_json import is_number
from labkit.report.still.axis import LEFT, MAX_LABEL_LENGTH, Axis, Record, values_of
from labkit.report.still.svg import cut, is_whole, stroke, text_element
from labkit.report.still.traces import marks, points_of

WIDTH, RIGHT = 640.0, 12.0  # width of the picture and right margin in pixels
LINE = 14.0  # distance between lines of text in pixels
LETTER = 5.6  # average width of a character of small text in pixels
_BREAK = re.compile(r"<br\s*/?>")
MAX_POINTS = 6_000  # greatest number of points of all lines in a picture together
MAX_TRACES = 1_000  # greatest number of traces; a figure with more has no picture
MAX_PARTS = 20_000  # greatest number of SVG elements in a picture


def picture(record: Record) -> str:
    """Return a Plotly figure, given as trusted or untrusted JSON, as an SVG picture.

    The result is "" if the figure has no supported trace or has too many elements.
    """
    layout = record.get("layout") or {}
    try:
        height = float(layout.get("height") or 450)
        parts = list(islice(_parts(record.get("data") or [], layout, height), MAX_PARTS + 1))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return ""  # The page describes an invalid figure from another author only as text.
    if not 0 < len(parts) <= MAX_PARTS:
        return ""
    box = f"viewBox='0 0 {WIDTH:g} {height:g}'"
    return f"<svg class='still' aria-hidden='true' {box}>{''.join(parts)}</svg>"


def _parts(data: Sequence[Record], layout: Record, height: float) -> Iterator[str]:
    """Yield the SVG elements of all panels; a panel is one pair of axes with its traces."""
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
    panel_starts = {WIDTH}  # left ends of panels including axis labels, in pixels
    for (x_name, y_name), traces in groupby(pairs, key=_axes):
        panel_traces = list(traces)
        x_look = layout.get(f"xaxis{x_name[1:]}") or {}
        y_look = layout.get(f"yaxis{y_name[1:]}") or {}
        (left, right), (low, high) = (look.get("domain") or (0, 1) for look in (x_look, y_look))
        inner_width, inner_height = WIDTH - LEFT - RIGHT, height - top - below
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
            x_pixel = LEFT + float(note["x"]) * (WIDTH - LEFT - RIGHT)
            y_pixel = top + (1 - float(note["y"])) * (height - top - below)
            anchor = {"center": "middle", "right": "end"}.get(str(note.get("xanchor")), "start")
            lines = _BREAK.split(note["text"])
            if anchor == "start":  # A left-aligned text must end before the next panel begins.
                room = (
                    min((start for start in panel_starts if start > x_pixel), default=WIDTH)
                    - x_pixel
                )
                lines = [cut(line, int(room / LETTER)) for line in lines]
            # If the `yanchor` of a note is "top", the note's position is that of its first line of
            # text. If the `yanchor` of a note is not "top", the note's position is that of its last
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
    """Return all values of the traces on the x or y axis, and 0 if a trace has bars."""
    values: list[Any] = []
    for trace in traces:
        axis_values = points_of(trace)[name == "y"]
        errors = values_of((trace.get(f"error_{name}") or {}).get("array"))
        pairs = zip(axis_values, errors, strict=False)
        values += axis_values + [a + more for a, more in pairs if is_number(a) and is_number(more)]
        is_length = trace.get("type") == "bar" and (name == "x") == (
            trace.get("orientation") == "h"
        )
        values += [0] if is_length else []
    return values
