"""A figure as a picture: lines and stacked bars of a Plotly figure in SVG, without a browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape, unescape
from typing import NamedTuple

from labkit.figures.kit.entries import INK
from labkit.figures.kit.panels import Trace

GRID = "#80808040"
DASHES = {"dash": "9 6", "dot": "3 3", "dashdot": "9 4 2 4"}


class Scale(NamedTuple):
    """How values lie along an axis: `low` at pixel `first`, `high` at pixel `last`."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values, at most so many.

        >>> Scale(0.0, 23.0, 0, 100).ticks()
        [0.0, 5.0, 10.0, 15.0, 20.0]
        """
        least = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * each for each in (1, 2, 5, 10) if power * each >= least)
        return [step * k for k in range(math.ceil(self.low / step), int(self.high // step) + 1)]


def picture(content: Trace) -> str:
    """SVG of data and layout, whose axes have domains."""
    layout, data = content["layout"], content["data"]
    width, height = layout["width"], layout["height"]
    title = layout["title"]["text"]
    parts = [_text(0, 18, title, 15)]
    for name in layout:
        if name.startswith("xaxis"):
            end = name.removeprefix("xaxis")
            own = [trace for trace in data if trace.get("xaxis", "x") == f"x{end}"]
            parts += _panel(layout, end, own)
    parts += _legend(data, width, height)
    return (
        f'<svg role="img" aria-label="{escape(unescape(title))}" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;font-family:system-ui,sans-serif" fill="{INK}">'
        f"{''.join(parts)}</svg>"
    )


def _panel(layout: Trace, end: str, traces: Sequence[Trace]) -> Iterator[str]:
    """One pair of axes, and what is drawn in it."""
    margin = layout["margin"]
    across = layout["width"] - margin["l"] - margin["r"]
    up = layout["height"] - margin["t"] - margin["b"]
    x, y = layout[f"xaxis{end}"], layout[f"yaxis{end}"]
    left, right = (margin["l"] + share * across for share in x["domain"])
    bottom, top = (margin["t"] + (1 - share) * up for share in y["domain"])
    bars = [trace for trace in traces if trace["type"] == "bar"]
    columns = _scale([v for t in traces for v in t["x"]], x, left, right)
    for tick in columns.ticks():
        at = columns.at(tick)
        yield f'<path d="M{at:.1f} {bottom:.1f}V{top:.1f}" stroke="{GRID}"/>'
        yield _text(at, bottom + 15, f"{tick:,.6g}", 11, "middle")
    yield _text((left + right) / 2, bottom + 32, x["title"]["text"], 12, "middle")
    if bars:
        yield from _bars(bars, columns, top, bottom)
        return
    rows = _scale([v for t in traces for v in t["y"]], y, bottom, top)
    for tick in rows.ticks():
        at = rows.at(tick)
        yield f'<path d="M{left:.1f} {at:.1f}H{right:.1f}" stroke="{GRID}"/>'
        yield _text(left - 5, at + 4, f"{tick:,.6g}", 11, "end")
    middle = (top + bottom) / 2
    turned = f' transform="rotate(-90 {left - 44:.0f} {middle:.0f})"'
    yield _text(left - 44, middle, y["title"]["text"], 12, "middle", turned)
    for trace in traces:
        yield _line(trace, columns, rows)


def _scale(values: Sequence[float], axis: Trace, first: float, last: float) -> Scale:
    """An axis that holds these values, with a little room around them."""
    if "range" in axis:
        low, high = axis["range"]
        return Scale(low, high, first, last)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.get("rangemode") == "tozero":
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or 0.5
    return Scale(low if low == 0 else low - room, high + room, first, last)


def _line(trace: Trace, columns: Scale, rows: Scale) -> str:
    places = [(columns.at(x), rows.at(y)) for x, y in zip(trace["x"], trace["y"], strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = trace["line"]
    dash = f' stroke-dasharray="{DASHES[line["dash"]]}"' if line["dash"] in DASHES else ""
    drawn = f'<polyline points="{points}" fill="none" stroke="{line["color"]}"{dash}/>'
    if "markers" in trace["mode"]:
        dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
        drawn += f'<g fill="{line["color"]}">{"".join(dots)}</g>'
    return drawn


def _bars(traces: Sequence[Trace], columns: Scale, top: float, bottom: float) -> Iterator[str]:
    """Bars that lie, stacked; the first one on top."""
    names = traces[0]["y"]
    each = (bottom - top) / len(names)
    for place, name in enumerate(names):
        begin, high = 0.0, top + (place + 0.15) * each
        yield _text(columns.first - 5, high + 0.35 * each + 4, name, 11, "end")
        for trace in traces:
            x, width = columns.at(begin), columns.at(trace["x"][place]) - columns.at(0)
            yield (
                f'<rect x="{x:.1f}" y="{high:.1f}" width="{width:.1f}" height="{0.7 * each:.1f}" '
                f'fill="{trace["marker"]["color"]}"/>'
            )
            begin += trace["x"][place]


def _legend(data: Sequence[Trace], width: float, height: float) -> Iterator[str]:
    x, y = 0.0, height - 34
    for trace in data:
        if trace.get("showlegend", True):
            needed = 40 + 7 * len(trace["name"])
            if x + needed > width:
                x, y = 0.0, y + 20
            color = trace["marker" if trace["type"] == "bar" else "line"]["color"]
            yield f'<path d="M{x:.0f} {y - 4}h16" stroke="{color}" stroke-width="4"/>'
            yield _text(x + 21, y, trace["name"], 12)
            x += needed


def _text(x: float, y: float, text: str, size: int, anchor: str = "start", more: str = "") -> str:
    # Plotly's own texts hold entities; a name that is none of labkit's may hold anything.
    inner = escape(unescape(text))
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{more}>{inner}</text>"
