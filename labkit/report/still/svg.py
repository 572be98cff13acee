"""Pieces of SVG; every text and colour in them is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape, unescape
from itertools import groupby
from typing import Any, TypeAlias

from labkit.common.privacy import scrub

Point: TypeAlias = tuple[float, float]  # pixels

_TAG = re.compile(r"<[^<>]*>")


def stroke(
    points: Sequence[Point],
    color: str,
    width: float,
    opacity: float = 1,
    dash: str = "solid",
) -> str:
    """A line through points."""
    # Many runs at one place are a point.
    shape = " ".join(place for place, _ in groupby(f"{a:.1f},{b:.1f}" for a, b in points))
    dashes = {"dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}.get(dash)
    more = f" stroke-dasharray='{dashes}'" if dashes else ""
    more += f" opacity='{opacity:g}'" if opacity != 1 else ""
    return (
        f"<polyline points='{shape}' fill='none' stroke='{color}' stroke-width='{width:g}'{more}/>"
    )


def dots(points: Sequence[Point], color: str, is_open: bool) -> str:
    """Markers of one look as one path: strokes of no length with round ends, however many."""
    shape = "".join(f"M{a:.1f},{b:.1f}h0" for a, b in points)
    round_ = "fill='none' stroke-linecap='round'"
    found = f"<path d='{shape}' {round_} stroke='{color}' stroke-width='8'/>"
    # A hole in the page's own colour leaves a ring.
    hole = f"<path d='{shape}' {round_} class='hole' stroke-width='4'/>" if is_open else ""
    return found + hole


def area(points: Sequence[Point], color: Any) -> str:
    """What lies within points."""
    shape = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f"<polygon points='{shape}' fill='{color_of(color, 0)}'/>"


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled one, by its upper left corner."""
    size = f"width='{width:.1f}' height='{height:.1f}'"
    return f"<rect x='{x:.1f}' y='{y:.1f}' {size} fill='{color}'/>"


def words(
    x: float, y: float, text: str, anchor: str, more: str = "", ink: str = "currentColor"
) -> str:
    """Text of Plotly's, which has tags and entities, as it is read."""
    said = escape(scrub(unescape(_TAG.sub(" ", text)).strip()), quote=False)
    place = f"x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}'"
    return f"<text {place} fill='{ink}' {more}>{said}</text>" if said else ""


def cut(text: str, most: int) -> str:
    """A text of at most so many letters, and of four at least."""
    return text if len(text) <= max(most, 4) else f"{text[: max(most, 4) - 1]}…"


def is_whole(point: Point) -> bool:
    """Whether the point stands anywhere."""
    return math.isfinite(point[0]) and math.isfinite(point[1])


def color_of(given: Any, number: int) -> str:
    """The colour of a trace, or of its point of this number."""
    own = given[number % len(given)] if isinstance(given, list) and given else given
    return escape(own, quote=True) if isinstance(own, str) else "#0072B2"


def between(scale: Sequence[Sequence[Any]], share: float) -> str:
    """A colour of a scale of `#rrggbb`."""
    place = max(1, next((n for n, (at, _) in enumerate(scale) if at >= share), len(scale) - 1))
    (low, first), (high, last) = scale[place - 1], scale[place]
    part = min(max((share - low) / ((high - low) or 1.0), 0.0), 1.0)
    ends = ([int(color[each : each + 2], 16) for each in (1, 3, 5)] for color in (first, last))
    return "#" + "".join(f"{round(a + part * (b - a)):02x}" for a, b in zip(*ends, strict=True))
