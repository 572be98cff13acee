"""Readable texts for numbers, sizes and times, and Plotly axes for sizes and times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from labkit.common.canonical_json import JSON

# `Axis` is the type of a dictionary with Plotly's properties of an axis.
Axis: TypeAlias = "dict[str, JSON]"

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def number_text(value: float) -> str:
    """Return a number as text: `0.1235` (four significant digits), or `12,346` from 1000 on."""
    # With four significant digits, 12,346 samples/s would appear as 1.235e+04.
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes as a text such as `1.5 MiB`."""
    power = min(int(math.log2(max(nbytes, 1)) // 10), len(_BYTES) - 1)
    return f"{_digits(nbytes / 1024**power)} {_BYTES[power]}"


def seconds_text(seconds: float) -> str:
    """Return a time in seconds as a text such as `12.3 ms`."""
    for scale, unit in _SECONDS:
        # A value that rounds to 1000 is shown in the next larger unit.
        if abs(seconds) >= 0.9995 * scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def duration_text(value: float) -> str:
    """Return a number of seconds as a text such as `2 h 5 min`."""
    if value < 10:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


_BITS = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"))


def bits_text(bandwidth: float) -> str:
    """Return a bandwidth in bytes/s as a text in bits/s, such as `1 Gb/s`."""
    bits = 8 * bandwidth
    # 999.9 Mb/s would be rounded to 1000 Mb/s, so it is shown as 1 Gb/s.
    scale, unit = next((pair for pair in _BITS if bits >= 0.9995 * pair[0]), _BITS[-1])
    return f"{bits / scale:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, in singular or plural: `1 stage`, `3 stages`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending}"


def bytes_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis of sizes in bytes, with about six ticks at powers of two."""
    low, high = _within(low, high)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((last - first) / 5))
    ticks = [2.0**power for power in range(first, last + 1, step)]
    return _logarithmic(low, high) | {"tickvals": ticks, "ticktext": [bytes_text(t) for t in ticks]}


def amounts_axis(least: float, most: float) -> Axis:
    """Return a byte axis for curves from 0 whose last values range from `least` to `most`.

    If `most` exceeds 12 times `least`, the axis is logarithmic and starts at a hundredth of
    `least`.
    """
    # The last values of several curves may differ by large factors. On a linear axis, the lowest
    # curve would touch the x axis.
    if most > 12 * least:
        return bytes_axis(least / 100, most)
    unit = 1024 ** min(int(math.log2(max(most, 1)) // 10), len(_BYTES) - 1)
    steps = (many * 10**power for power in range(DECADES) for many in (1, 2, 5))
    step = next((s for s in steps if most / unit <= 5.5 * s), most / unit / 5)
    ticks = [float(unit * step * place) for place in range(int(most / unit // step) + 1)]
    return {"tickvals": ticks, "ticktext": [bytes_text(t) for t in ticks], "rangemode": "tozero"}


def seconds_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis in seconds with a suitable number of ticks."""
    low, high = _within(low, high)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 6))
    within = (1, 2, 5) if last - first <= 2 else (1, 3) if last - first <= 3 else (1,)
    ticks = [many * 10.0**power for power in range(first, last + 1, step) for many in within]
    return _logarithmic(low, high) | {
        "tickvals": ticks,
        "ticktext": [seconds_text(t) for t in ticks],
    }


DECADES = 18  # A logarithmic axis covers at most 18 decades (DECADES).
# The ends of an axis are between 1e-100 and 1e100 (_ENDS). A larger tick on the axis could overflow
# a float.
_ENDS = 1e-100, 1e100


def _within(low: float, high: float) -> tuple[float, float]:
    """Return both ends of a logarithmic axis, within `_ENDS` and at most `DECADES` decades long."""
    high = min(max(high, _ENDS[0]), _ENDS[1])
    return min(max(low, high / 10.0**DECADES), high), high


def _logarithmic(low: float, high: float) -> Axis:
    room = 0.04 * max(math.log10(high / low), 1)
    return {"type": "log", "range": [math.log10(low) - room, math.log10(high) + room]}


def _digits(value: float) -> str:
    """Return a number as text with three significant digits, from 100 on as a whole number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
