"""A figure that a notebook updates, with a placeholder until Plotly has drawn the figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape, unescape
from pathlib import Path
from typing import NamedTuple

import anywidget
import ipywidgets
import traitlets

from labkit.figures.kit.entries import INK
from labkit.figures.kit.panels import Trace

GRID = "#80808040"
DASHES = {"dash": "9 6", "dot": "3 3", "dashdot": "9 4 2 4"}


class PixelScale(NamedTuple):
    """A linear axis, where value `low` is at pixel `first`, and value `high` at pixel `last`."""

    low: float
    high: float
    first: float
    last: float

    def at(self, value: float) -> float:
        """Return the pixel position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return self.first + share * (self.last - self.first)

    def ticks(self, most: int = 6) -> list[float]:
        """Return at most `most` round values within the axis.

        >>> PixelScale(0.0, 23.0, 0, 100).ticks() [0.0, 5.0, 10.0, 15.0, 20.0]
        """
        least = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(least))
        step = next(power * multiple for multiple in (1, 2, 5, 10) if power * multiple >= least)
        return [step * k for k in range(math.ceil(self.low / step), int(self.high // step) + 1)]


def picture(content: Trace) -> str:
    """Return an SVG picture of a Plotly figure, whose JSON must contain the positions of axes."""
    layout, data = content["layout"], content["data"]
    width, height = layout["width"], layout["height"]
    title = layout["title"]["text"]
    parts = [_text(0, 18, title, 15)]
    for name in layout:
        if name.startswith("xaxis"):
            end = name.removeprefix("xaxis")
            group = [trace for trace in data if trace.get("xaxis", "x") == f"x{end}"]
            parts += _panel(layout, end, group)
    parts += _legend(data, width, height)
    return (
        f'<svg role="img" aria-label="{escape(unescape(title))}" viewBox="0 0 {width} {height}" '
        f'style="width:100%;max-width:{width}px;font-family:system-ui,sans-serif" fill="{INK}">'
        f"{''.join(parts)}</svg>"
    )


def _panel(layout: Trace, end: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield the SVG elements of one panel, which consists of a pair of axes and its traces."""
    margin = layout["margin"]
    across = layout["width"] - margin["l"] - margin["r"]
    up = layout["height"] - margin["t"] - margin["b"]
    x, y = layout[f"xaxis{end}"], layout[f"yaxis{end}"]
    left, right = (margin["l"] + share * across for share in x["domain"])
    bottom, top = (margin["t"] + (1 - share) * up for share in y["domain"])
    bars = [trace for trace in traces if trace["type"] == "bar"]
    columns = _axis_scale([v for t in traces for v in t["x"]], x, left, right)
    for tick in columns.ticks():
        at = columns.at(tick)
        yield f'<path d="M{at:.1f} {bottom:.1f}V{top:.1f}" stroke="{GRID}"/>'
        yield _text(at, bottom + 15, f"{tick:,.6g}", 11, "middle")
    yield _text((left + right) / 2, bottom + 32, x["title"]["text"], 12, "middle")
    if bars:
        yield from _bars(bars, columns, top, bottom)
        return
    rows = _axis_scale([v for t in traces for v in t["y"]], y, bottom, top)
    for tick in rows.ticks():
        at = rows.at(tick)
        yield f'<path d="M{left:.1f} {at:.1f}H{right:.1f}" stroke="{GRID}"/>'
        yield _text(left - 5, at + 4, f"{tick:,.6g}", 11, "end")
    middle = (top + bottom) / 2
    turned = f' transform="rotate(-90 {left - 44:.0f} {middle:.0f})"'
    yield _text(left - 44, middle, y["title"]["text"], 12, "middle", turned)
    for trace in traces:
        yield _line(trace, columns, rows)


def _axis_scale(values: Sequence[float], axis: Trace, first: float, last: float) -> PixelScale:
    """Return an axis that contains all given values, with a margin of 5 % at the ends."""
    if "range" in axis:
        low, high = axis["range"]
        return PixelScale(low, high, first, last)
    low, high = min(values, default=0.0), max(values, default=1.0)
    if axis.get("rangemode") == "tozero":
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or 0.5
    return PixelScale(low if low == 0 else low - room, high + room, first, last)


def _line(trace: Trace, columns: PixelScale, rows: PixelScale) -> str:
    places = [(columns.at(x), rows.at(y)) for x, y in zip(trace["x"], trace["y"], strict=True)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = trace["line"]
    dash = f' stroke-dasharray="{DASHES[line["dash"]]}"' if line["dash"] in DASHES else ""
    drawn = f'<polyline points="{points}" fill="none" stroke="{line["color"]}"{dash}/>'
    if "markers" in trace["mode"]:
        dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in places)
        drawn += f'<g fill="{line["color"]}">{"".join(dots)}</g>'
    return drawn


def _bars(traces: Sequence[Trace], columns: PixelScale, top: float, bottom: float) -> Iterator[str]:
    """Yield stacked horizontal bars, with the first category on top."""
    names = traces[0]["y"]
    height = (bottom - top) / len(names)
    for row_index, name in enumerate(names):
        begin, high = 0.0, top + (row_index + 0.15) * height
        yield _text(columns.first - 5, high + 0.35 * height + 4, name, 11, "end")
        for trace in traces:
            x, width = columns.at(begin), columns.at(trace["x"][row_index]) - columns.at(0)
            yield (
                f'<rect x="{x:.1f}" y="{high:.1f}" width="{width:.1f}" height="{0.7 * height:.1f}" '
                f'fill="{trace["marker"]["color"]}"/>'
            )
            begin += trace["x"][row_index]


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
    # Texts for Plotly contain HTML entities, which `unescape` converts to characters first. The
    # resulting text is escaped again, because users' names may contain any character.
    inner = escape(unescape(text))
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place}{more}>{inner}</text>"


class _Source(ipywidgets.Widget):
    """A widget that stores Plotly's script, and sends the script to the figures that request it.

    A reloaded page receives the states of widgets before anything else. Plotly's script would make
    the state of a widget too large. The other widgets must appear on the reloaded page within four
    seconds.
    """

    def __init__(self) -> None:
        from plotly.offline import get_plotlyjs

        super().__init__()
        script = get_plotlyjs().encode()
        self.on_msg(lambda *_: self.send({}, buffers=[script]))


class _Plot(anywidget.AnyWidget):
    """A widget in which the browser draws a figure with Plotly.

    Attributes:
        figure: Data and layout of the figure; each change replaces both.
        ended: Whether the figure will not change any more.
        chosen: Key of the run that the user highlights; an empty key highlights no run.
    """

    _esm = Path(__file__).with_name("screen.js")
    _source = traitlets.Unicode().tag(sync=True)
    figure = traitlets.Dict().tag(sync=True)
    ended = traitlets.Bool().tag(sync=True)
    chosen = traitlets.Unicode().tag(sync=True)


class FigureScreen:
    """A display area in a notebook for a figure that changes over time.

    A placeholder (a picture or text) uses only standard Jupyter widgets. Each browser shows the
    placeholder until Plotly is loaded and has drawn a change. Plotly may need seconds for this, or
    may never load.

    Args:
        content: Data and layout of the first figure, as Plotly JSON.
        words: HTML text of the placeholder; default: an SVG picture of the figure.

    Attributes:
        widget: The widget that the notebook displays.
        content: Current data and layout of the figure, as Plotly JSON.
        plot: The widget in which Plotly draws the figure; None before the first change.
    """

    def __init__(self, content: Trace, words: str = "") -> None:
        self._words, self._picture = words, ipywidgets.HTML()
        self._picture.add_class("labkit-picture")
        self.plot: _Plot | None = None
        self.widget = ipywidgets.VBox([self._picture])
        self.widget.add_class("labkit-screen")
        self._set_content(content)

    def show(self, content: Trace, ended: bool = False) -> None:
        """Replace the shown figure by `content`; `ended` marks the last change of the figure."""
        self._set_content(content)
        if self.plot is None:
            # The picture is sent before the plot, because Plotly's script of several megabytes
            # delays later messages.
            self.plot = _Plot(_source=_source().model_id, figure=content, ended=ended)
            self.widget.children = [self._picture, self.plot]
        else:
            self.plot.set_state({"figure": content, "ended": ended})

    def _set_content(self, content: Trace) -> None:
        self.content, self._picture.value = content, self._words or picture(content)


@cache
def _source() -> _Source:
    return _Source()
