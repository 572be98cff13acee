"""Numbers, bytes and seconds as people read them, and axes of them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, TypeAlias

from labkit.common.errors import InvalidInput, short

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

Axis: TypeAlias = "dict[str, JSON]"  # Plotly's words for an axis

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def number_text(value: float) -> str:
    """`0.1235`, `12,346`: four digits, from a thousand on in whole numbers."""
    # Of 12,346 samples/s four digits would be 1.235e+04.
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bytes_text(nbytes: float) -> str:
    """`1.5 MiB`"""
    power = min(int(math.log2(max(nbytes, 1)) // 10), len(_BYTES) - 1)
    return f"{_digits(nbytes / 1024**power)} {_BYTES[power]}"


def seconds_text(seconds: float) -> str:
    """`12.3 ms`"""
    for scale, unit in _SECONDS:
        # What rounds to 1000 of a unit is 1 of the next.
        if abs(seconds) >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def duration_text(value: float) -> str:
    """A duration in words: 4.2 s, 3 min 20 s, 2 h 5 min."""
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_BITS = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"))


def bits_text(bandwidth: float) -> str:
    """Bytes/s as `1 Gb/s`."""
    bits = 8 * bandwidth
    # As for seconds: 999.9 Mb/s are said to be 1 Gb/s.
    scale, unit = next((pair for pair in _BITS if bits >= 0.9995 * pair[0]), _BITS[-1])
    return f"{bits / scale:.3g} {unit}"


_RATES = {"Mb": 10**6, "Gb": 10**9}


def bits_of(rate: str, field: str = "rate") -> int:
    """Bits/s of a rate such as 100Mb, 100Mb/s or 1Gb/s. Raises: InvalidInput, naming the field."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(Mb|Gb)(?:/s)?", rate) if isinstance(rate, str) else None
    if not found or float(found[1]) * _RATES[found[2]] < _RATES["Mb"]:
        raise InvalidInput(
            f"{field}={short(rate)} is impossible; "
            "give bits a second from 1Mb up, such as 100Mb or 1Gb"
        )
    return round(float(found[1]) * _RATES[found[2]])


def plural(count: int, what: str) -> str:
    """`1 stage`, `3 stages`, `2 micro-batches`"""
    ending = "" if count == 1 else "es" if what.endswith("ch") else "s"
    return f"{count} {what}{ending}"


def bytes_axis(low: float, high: float) -> Axis:
    """A logarithmic axis of buffer sizes; a tick every 2, 8, 32, … times, six or so in all."""
    low, high = _within(low, high)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / 5))
    ticks = [2.0**power for power in range(first, last + 1, step)]
    return _logarithmic(low, high) | {"tickvals": ticks, "ticktext": [bytes_text(t) for t in ticks]}


def amounts_axis(least: float, most: float) -> Axis:
    """An axis of bytes that grow from nothing to between `least` and `most`.

    Logarithmic where these differ so much that the least would be a line on the y axis; it then
    begins at a hundredth of the least.
    """
    # About one order of magnitude: the least is then a line of a few pixels.
    if most > 12 * least:
        return bytes_axis(least / 100, most)
    unit = 1024 ** min(int(math.log2(max(most, 1)) // 10), len(_BYTES) - 1)
    steps = (many * 10**power for power in range(DECADES) for many in (1, 2, 5))
    step = next((s for s in steps if most / unit <= 5.5 * s), most / unit / 5)
    ticks = [float(unit * step * place) for place in range(int(most / unit // step) + 1)]
    return {"tickvals": ticks, "ticktext": [bytes_text(t) for t in ticks], "rangemode": "tozero"}


def seconds_axis(low: float, high: float) -> Axis:
    """A logarithmic axis of times; a tick every 10, 100, … times, on a short one 1, 2, 5, 10, …"""
    low, high = _within(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 6))
    within = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
    ticks = [many * 10.0**power for power in range(first, last + 1, step) for many in within]
    return _logarithmic(low, high) | {
        "tickvals": ticks,
        "ticktext": [seconds_text(t) for t in ticks],
    }


DECADES = 18  # of a logarithmic axis: nothing that labkit measures differs by more
_ENDS = 1e-100, 1e100  # beyond which no tick is a number of Python's


def _within(low: float, high: float) -> tuple[float, float]:
    """Return the ends of an axis that has room for its decades; what is less has no place on it."""
    high = min(max(high, _ENDS[0]), _ENDS[1])
    return min(max(low, high / 10.0**DECADES), high), high


def _logarithmic(low: float, high: float) -> Axis:
    room = 0.04 * max(math.log10(high / low), 1)
    return {"type": "log", "range": [math.log10(low) - room, math.log10(high) + room]}


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
