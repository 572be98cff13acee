"""Functions that return SVG elements, in which all texts and colours are escaped."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from labkit.common.privacy import scrub

Point: TypeAlias = tuple[float, float]  # A `Point` consists of the coordinates x and y in pixels.

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
    """Shorten a text to `most` characters, but never to fewer than four."""
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


# A `Record` is a part of a Plotly figure's JSON, which may be untrusted.
Record: TypeAlias = Mapping[str, Any]

LEFT = 62.0  # The constant LEFT is the minimum width in pixels for the labels of a vertical axis.
MAX_LABEL_LENGTH = 18
MAX_TICKS = 60  # The number of ticks is limited, because too many ticks would merge into a bar.
# Exponents on a logarithmic axis lie between -300 and 300, because floats cannot represent much
# larger powers.
DECADES = 300


class Axis:
    """An axis that maps values to pixels between two ends.

    Args:
        look: Plotly's options for the axis, such as title, type, range, and ticks.
        values: All values along the axis, from all traces.
        first, last: Pixel positions of the two ends of the axis.
    """

    def __init__(self, look: Record, values: list[Any], first: float, last: float) -> None:
        self.look, self.first, self.last = look, first, last
        texts = [value for value in values if isinstance(value, str)]
        self.is_log = look.get("type") == "log"
        self.names: list[str] = []
        if texts or look.get("type") == "category":
            ordered = [*(look.get("categoryarray") or []), *map(str, values)]
            self.names = list(dict.fromkeys(ordered))
        self._indices = {name: float(place) for place, name in enumerate(self.names)}
        numbers = [self._number(value) for value in values]
        finite = [number for number in numbers if math.isfinite(number)]
        least, most = min(finite, default=0.0), max(finite, default=1.0)
        if look.get("rangemode") == "tozero":
            least = min(0.0, least)
        margin = 0.5 if self.names else 0.05 * ((most - least) or abs(most) or 1.0)
        limits = look.get("range") or (least - margin, most + margin)
        # If a limit in a Plotly range is None, the data determine this limit.
        self.low = least - margin if limits[0] is None else float(limits[0])
        self.high = most + margin if limits[1] is None else float(limits[1])
        if look.get("autorange") == "reversed":
            self.low, self.high = self.high, self.low

    def _number(self, value: Any) -> float:
        if self.names:
            return self._indices.get(str(value), math.nan)
        if value is None:
            return math.nan
        number = float(value)
        return (math.log10(number) if number > 0 else math.nan) if self.is_log else number

    def at(self, value: Any) -> float:
        """Return the pixel position of a value, or NaN if the axis cannot show the value."""
        return self._at(self._number(value))

    def _at(self, number: float) -> float:
        share = (number - self.low) / ((self.high - self.low) or 1.0)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Yield the pixel position and the text of each tick between the ends of the axis."""
        for value, text in self._ticks():
            pixel = self.at(value)
            if min(self.first, self.last) - 1 <= pixel <= max(self.first, self.last) + 1:
                yield pixel, text

    def _ticks(self) -> Iterable[tuple[Any, str]]:
        if tick_values := self.look.get("tickvals"):
            texts = self.look.get("ticktext") or [f"{value:g}" for value in tick_values]
            return _thin_ticks(list(zip(tick_values, texts, strict=False)))
        if self.names:
            return _thin_ticks([(name, name) for name in self.names])
        least, most = sorted((self.low, self.high))
        return self._powers(least, most) if self.is_log else self._multiples(least, most)

    def _powers(self, least: float, most: float) -> Iterator[tuple[float, str]]:
        """Yield ticks at powers of ten, and on short axes also at two and five times each power."""
        first, last = math.floor(max(least, -DECADES)), math.ceil(min(most, DECADES))
        for power in range(first, last + 1, max(1, (last - first) // 12)):
            for factor in (1, 2, 5) if most - least < 2 else (1,):
                yield factor * 10.0**power, f"{factor * 10.0**power:g}"

    def _multiples(self, least: float, most: float) -> Iterator[tuple[float, str]]:
        """Yield about five ticks at multiples of a round number."""
        least_step = most / 5 - least / 5 or 1.0
        unit = 10.0 ** math.floor(math.log10(least_step))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least_step)
        percent = str(self.look.get("tickformat") or "").endswith("%")
        for number in range(math.ceil(least / step), math.floor(most / step) + 1):
            value = number * step
            yield value, f"{100 * value:.3g} %" if percent else f"{value:.6g}"

    @property
    def room(self) -> float:
        """Width in pixels that the labels and the title of a vertical axis need."""
        longest = max((len(cut(text, MAX_LABEL_LENGTH)) for _, text in self.ticks()), default=0)
        return max(LEFT, 28 + 6.2 * longest)

    @property
    def title(self) -> str:
        """Title of the axis."""
        title = self.look.get("title")
        return str(title.get("text") or "") if isinstance(title, Mapping) else str(title or "")


def _thin_ticks(ticks: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Return evenly spaced ticks, at most `MAX_TICKS` of them."""
    return ticks[:: math.ceil(len(ticks) / MAX_TICKS)]


def values_of(values: Any) -> list[Any]:
    """Return a trace's values as a list, even if Plotly stores them in a packed NumPy format."""
    if isinstance(values, Mapping):
        flat = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        shape = [int(size) for size in str(values.get("shape") or flat.size).split(",")]
        array: list[Any] = flat.reshape(shape).tolist()
        return array
    return list(values) if values is not None else []
