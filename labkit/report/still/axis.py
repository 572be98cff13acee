"""An axis of a still picture: where values stand, and what is said of them."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from labkit.report.still.svg import cut

Record: TypeAlias = Mapping[str, Any]  # of Plotly's JSON, from whoever has made it

LEFT = 62.0  # pixels beside it, at least
LONGEST = 18  # letters beside it
MOST_TICKS = 60  # more are a black bar
DECADES = 300  # of a logarithmic axis, to both sides of 1; Python's numbers end soon after


class Axis:
    """Where values stand between two ends.

    Args:
        look: as Plotly has it: title, type, range, ticks.
        values: of all that stands along it.
        first, last: pixels of its ends.
    """

    def __init__(self, look: Record, values: list[Any], first: float, last: float) -> None:
        self.look, self.first, self.last = look, first, last
        words = [value for value in values if isinstance(value, str)]
        self.is_log = look.get("type") == "log"
        self.names: list[str] = []
        if words or look.get("type") == "category":
            ordered = [*(look.get("categoryarray") or []), *map(str, values)]
            self.names = list(dict.fromkeys(ordered))
        self._places = {name: float(place) for place, name in enumerate(self.names)}
        numbers = [self._number(value) for value in values]
        known = [number for number in numbers if math.isfinite(number)]
        least, most = min(known, default=0.0), max(known, default=1.0)
        if look.get("rangemode") == "tozero":
            least = min(0.0, least)
        room = 0.5 if self.names else 0.05 * ((most - least) or abs(most) or 1.0)
        ends = look.get("range") or (least - room, most + room)
        # Either may be left to Plotly.
        self.low = least - room if ends[0] is None else float(ends[0])
        self.high = most + room if ends[1] is None else float(ends[1])
        if look.get("autorange") == "reversed":
            self.low, self.high = self.high, self.low

    def _number(self, value: Any) -> float:
        if self.names:
            return self._places.get(str(value), math.nan)
        if value is None:
            return math.nan
        number = float(value)
        return (math.log10(number) if number > 0 else math.nan) if self.is_log else number

    def at(self, value: Any) -> float:
        """The pixel of a value; NaN where it has none."""
        return self._at(self._number(value))

    def _at(self, number: float) -> float:
        share = (number - self.low) / ((self.high - self.low) or 1.0)
        return self.first + share * (self.last - self.first)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Pixels and words of its ticks, those within its ends."""
        for value, text in self._ticks():
            place = self.at(value)
            if min(self.first, self.last) - 1 <= place <= max(self.first, self.last) + 1:
                yield place, text

    def _ticks(self) -> Iterable[tuple[Any, str]]:
        if given := self.look.get("tickvals"):
            texts = self.look.get("ticktext") or [f"{value:g}" for value in given]
            return _some(list(zip(given, texts, strict=False)))
        if self.names:
            return _some([(name, name) for name in self.names])
        least, most = sorted((self.low, self.high))
        return self._powers(least, most) if self.is_log else self._multiples(least, most)

    def _powers(self, least: float, most: float) -> Iterator[tuple[float, str]]:
        """Powers of ten, few enough to be read; on a short axis 2 and 5 times these, too."""
        first, last = math.floor(max(least, -DECADES)), math.ceil(min(most, DECADES))
        for power in range(first, last + 1, max(1, (last - first) // 12)):
            for many in (1, 2, 5) if most - least < 2 else (1,):
                yield many * 10.0**power, f"{many * 10.0**power:g}"

    def _multiples(self, least: float, most: float) -> Iterator[tuple[float, str]]:
        """Five multiples or so of a round number."""
        wanted = most / 5 - least / 5 or 1.0
        unit = 10.0 ** math.floor(math.log10(wanted))
        step = next(unit * many for many in (1, 2, 5, 10) if unit * many >= wanted)
        percent = str(self.look.get("tickformat") or "").endswith("%")
        for number in range(math.ceil(least / step), math.floor(most / step) + 1):
            value = number * step
            yield value, f"{100 * value:.3g} %" if percent else f"{value:.6g}"

    @property
    def room(self) -> float:
        """Pixels beside it for its words and its title."""
        longest = max((len(cut(text, LONGEST)) for _, text in self.ticks()), default=0)
        return max(LEFT, 28 + 6.2 * longest)

    @property
    def title(self) -> str:
        """What stands beside it."""
        title = self.look.get("title")
        return str(title.get("text") or "") if isinstance(title, Mapping) else str(title or "")


def _some(ticks: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Return as many ticks as an axis has room for, evenly over all."""
    return ticks[:: math.ceil(len(ticks) / MOST_TICKS)]


def values_of(values: Any) -> list[Any]:
    """Values of a trace: a list, or numbers packed as Plotly packs those of NumPy."""
    if isinstance(values, Mapping):
        flat = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        shape = [int(each) for each in str(values.get("shape") or flat.size).split(",")]
        found: list[Any] = flat.reshape(shape).tolist()
        return found
    return list(values) if values is not None else []
