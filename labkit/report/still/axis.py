"""An axis in a still picture: pixel positions of values, ticks, and the title."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from labkit.report.still.svg import cut

Record: TypeAlias = Mapping[str, Any]  # Plotly JSON, possibly untrusted

LEFT = 62.0  # minimum width in pixels for the labels of a vertical axis
MAX_LABEL_LENGTH = 18  # maximum number of characters in a label of a vertical axis
MAX_TICKS = 60  # maximum number of ticks; more would merge into a bar
DECADES = 300  # maximum power of ten on a logarithmic axis (limit of floats)


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
        """Return the pixel position of a value; NaN if the axis cannot show the value."""
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
        """Yield ticks at powers of ten; on short axes, also at two and five times each power."""
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
    """Return a trace's values as a list, which Plotly may store in a packed NumPy format."""
    if isinstance(values, Mapping):
        flat = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        shape = [int(size) for size in str(values.get("shape") or flat.size).split(",")]
        array: list[Any] = flat.reshape(shape).tolist()
        return array
    return list(values) if values is not None else []
