"""SVG elements; the functions escape all texts and colours."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape, unescape
from itertools import groupby
from typing import Any, TypeAlias

from labkit.common.privacy import scrub

Point: TypeAlias = tuple[float, float]  # x and y in pixels

_TAG = re.compile(r"<[^<>]*>")


def stroke(
    points: Sequence[Point],
    color: str,
    width: float,
    opacity: float = 1,
    dash: str = "solid",
) -> str:
    """Return an SVG line through points."""
    # Consecutive points with equal rounded coordinates are drawn once.
    shape = " ".join(pixel for pixel, _ in groupby(f"{a:.1f},{b:.1f}" for a, b in points))
    dashes = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}.get(dash)
    attributes = f" stroke-dasharray='{dashes}'" if dashes else ""
    attributes += f" opacity='{opacity:g}'" if opacity != 1 else ""
    return (
        f"<polyline points='{shape}' fill='none' stroke='{color}' "
        f"stroke-width='{width:g}'{attributes}/>"
    )


def dots(points: Sequence[Point], color: str, is_open: bool) -> str:
    """Return markers at points as one SVG path of zero-length strokes with round ends."""
    shape = "".join(f"M{a:.1f},{b:.1f}h0" for a, b in points)
    round_ = "fill='none' stroke-linecap='round'"
    markers = f"<path d='{shape}' {round_} stroke='{color}' stroke-width='8'/>"
    # A dot in the page's background colour turns the marker into a ring.
    hole = f"<path d='{shape}' {round_} class='hole' stroke-width='4'/>" if is_open else ""
    return markers + hole


def area(points: Sequence[Point], color: Any) -> str:
    """Return an SVG polygon with a fill."""
    shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f"<polygon points='{shape}' fill='{color_of(color, 0)}'/>"


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled SVG rectangle, given its upper left corner and its size."""
    size = f"width='{width:.1f}' height='{height:.1f}'"
    return f"<rect x='{x:.1f}' y='{y:.1f}' {size} fill='{color}'/>"


def text_element(
    x: float, y: float, text: str, anchor: str, more: str = "", ink: str = "currentColor"
) -> str:
    """Return an SVG text element for a text from Plotly, without its HTML tags and entities."""
    content = escape(scrub(unescape(_TAG.sub(" ", text)).strip()), quote=False)
    position = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {position} fill='{ink}' {more}>{content}</text>" if content else ""


def cut(text: str, most: int) -> str:
    """Return a text shortened to `most` characters, but never to fewer than four."""
    return text if len(text) <= max(most, 4) else f"{text[: max(most, 4) - 1]}…"


def is_whole(point: Point) -> bool:
    """Return True if both coordinates of a point are finite."""
    return math.isfinite(point[0]) and math.isfinite(point[1])


def color_of(color_value: Any, number: int) -> str:
    """Return the colour of a trace, or of its point `number` if each point has its own colour."""
    color = (
        color_value[number % len(color_value)]
        if isinstance(color_value, list) and color_value
        else color_value
    )
    return escape(color, quote=True) if isinstance(color, str) else "#0072B2"


def interpolate(scale: Sequence[Sequence[Any]], share: float) -> str:
    """Return the colour at position `share` (0 to 1) of a Plotly scale of `#rrggbb` colours."""
    index = max(
        1, next((n for n, (threshold, _) in enumerate(scale) if threshold >= share), len(scale) - 1)
    )
    (low, first), (high, last) = scale[index - 1], scale[index]
    fraction = min(max((share - low) / ((high - low) or 1.0), 0.0), 1.0)
    channels = (
        [int(color[start : start + 2], 16) for start in (1, 3, 5)] for color in (first, last)
    )
    return "#" + "".join(
        f"{round(a + fraction * (b - a)):02x}" for a, b in zip(*channels, strict=True)
    )
