"""A Plotly figure as a still picture, for a page whose scripts may not run: SVG, simply drawn.

Lines, bands, markers, bars, cells and parallel coordinates are drawn as on the page; what is none
of these has no picture, and stands in words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from labkit.common.canonical_json import is_number
from labkit.report.still.axis import LEFT, LONGEST, Axis, Record, values_of
from labkit.report.still.svg import cut, is_whole, stroke, words
from labkit.report.still.traces import marks, points_of

WIDTH, RIGHT = 640.0, 12.0  # pixels
LINE = 14.0  # from a line of text to the next
LETTER = 5.6  # of the pictures' small type, on average
_BREAK = re.compile(r"<br\s*/?>")
MOST_POINTS = 6_000  # of all lines of a picture together
MOST_TRACES = 1_000  # that pictures are drawn of; more are a fog
MOST_PARTS = 20_000  # of a picture


def picture(record: Record) -> str:
    """The SVG of a figure's JSON, trusted or not; empty where it has nothing of these kinds,
    or so much that nobody would see anything.
    """
    layout = record.get("layout") or {}
    try:
        height = float(layout.get("height") or 450)
        parts = list(islice(_parts(record.get("data") or [], layout, height), MOST_PARTS + 1))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return ""  # of a stranger's figure: it stands in words all the same
    if not 0 < len(parts) <= MOST_PARTS:
        return ""
    box = f"viewBox='0 0 {WIDTH:g} {height:g}'"
    return f"<svg class='still' aria-hidden='true' {box}>{''.join(parts)}</svg>"


def _parts(data: Sequence[Record], layout: Record, height: float) -> Iterator[str]:
    """Of all panels of a figure: those of one pair of axes are one."""
    if any(trace.get("type") == "parcoords" for trace in data):
        yield from _parallel(data[0], height)
        return
    margin = layout.get("margin") or {}
    top, below = float(margin.get("t", 40)), float(margin.get("b", 50))

    drawn = [each for each in data if each.get("visible", True) is True and _known(each)]
    if len(drawn) > MOST_TRACES:
        return
    pairs = sorted(drawn, key=_axes)
    each = max(2, MOST_POINTS // max(1, len(drawn)))
    begins = {WIDTH}  # of panels, with what stands left of their axes
    for (x_name, y_name), traces in groupby(pairs, key=_axes):
        own = list(traces)
        x_look = layout.get(f"xaxis{x_name[1:]}") or {}
        y_look = layout.get(f"yaxis{y_name[1:]}") or {}
        (left, right), (low, high) = (look.get("domain") or (0, 1) for look in (x_look, y_look))
        across, down = WIDTH - LEFT - RIGHT, height - top - below
        y = Axis(y_look, _values(own, "y"), top + (1 - low) * down, top + (1 - high) * down)
        begin = LEFT + left * across if left else y.room
        x = Axis(x_look, _values(own, "x"), begin, LEFT + right * across)
        begins.add(begin - y.room)
        yield from _frame(x, y)
        for trace in own:
            yield from marks(trace, own, x, y, each)
    for note in layout.get("annotations") or []:
        if note.get("xref") == note.get("yref") == "paper" and note.get("text"):
            place = LEFT + float(note["x"]) * (WIDTH - LEFT - RIGHT)
            down = top + (1 - float(note["y"])) * (height - top - below)
            anchor = {"center": "middle", "right": "end"}.get(str(note.get("xanchor")), "start")
            lines = _BREAK.split(note["text"])
            if anchor == "start":  # the title of the panel beside it begins there
                room = min((each for each in begins if each > place), default=WIDTH) - place
                lines = [cut(line, int(room / LETTER)) for line in lines]
            # A title stands on its place, line by line; a note hangs from it.
            above = 0 if note.get("yanchor") == "top" else len(lines) - 1
            for number, line in enumerate(lines):
                shift = LINE * (above - number) + float(note.get("yshift") or 0)
                yield words(place, down - shift, line, anchor)


def _known(trace: Record) -> bool:
    kind = trace.get("type") or "scatter"
    return kind == "heatmap" or (kind in ("scatter", "scattergl", "bar") and "y" in trace)


def _axes(trace: Record) -> tuple[str, str]:
    return str(trace.get("xaxis") or "x"), str(trace.get("yaxis") or "y")


def _frame(x: Axis, y: Axis) -> Iterator[str]:
    """The two axes with their ticks and titles."""
    if x.look.get("visible") is not False:
        yield stroke([(x.first, y.first), (x.last, y.first)], "currentColor", 1)
        room = (x.last - x.first) / max(1, len(list(x.ticks())))
        for place, text in x.ticks() if x.look.get("showticklabels", True) else ():
            yield words(place, y.first + 14, cut(text, int(room / 6)), "middle")
        yield words((x.first + x.last) / 2, y.first + 32, x.title, "middle")
    if y.look.get("visible") is not False:
        yield stroke([(x.first, y.first), (x.first, y.last)], "currentColor", 1)
        for place, text in y.ticks():
            yield stroke([(x.first, place), (x.last, place)], "currentColor", 1, 0.15)
            if y.look.get("showticklabels", True):
                yield words(x.first - 5, place + 4, cut(text, LONGEST), "end")
        middle, beside = (y.first + y.last) / 2, x.first - y.room + 12
        turned = f"transform='rotate(-90 {beside:.1f} {middle:.1f})'"
        yield words(beside, middle, y.title, "middle", turned)


def _parallel(trace: Record, height: float) -> Iterator[str]:
    """An upright axis for each parameter and result, and a line for each run."""
    shown = [each for each in trace["dimensions"] if each.get("visible", True)]
    step = (WIDTH - 2 * LEFT) / max(1, len(shown) - 1)
    axes = []
    for number, look in enumerate(shown):
        values = values_of(look["values"])
        axes.append((LEFT + number * step, Axis(look, values, height - 20, 50), values))
        place, axis, _ = axes[-1]
        yield stroke([(place, axis.first), (place, axis.last)], "currentColor", 1)
        yield words(place, 22 + 14 * (number % 2), str(look.get("label") or ""), "middle")
        for at, text in axis.ticks():
            yield words(place + 4, at + 4, cut(text, 12), "start")
    for run in range(len(axes[0][2])):
        points = [(place, axis.at(values[run])) for place, axis, values in axes]
        yield stroke([point for point in points if is_whole(point)], "#0072B2", 1.5, 0.7)


def _values(traces: Iterable[Record], name: str) -> list[Any]:
    """All that stands along an axis, with nothing itself where bars begin there."""
    found: list[Any] = []
    for trace in traces:
        own = points_of(trace)[name == "y"]
        spread = values_of((trace.get(f"error_{name}") or {}).get("array"))
        ends = zip(own, spread, strict=False)
        found += own + [a + more for a, more in ends if is_number(a) and is_number(more)]
        is_length = trace.get("type") == "bar" and (name == "x") == (
            trace.get("orientation") == "h"
        )
        found += [0] if is_length else []
    return found
