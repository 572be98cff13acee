"""A parser for times, sizes and data rates with units."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

from labkit.common.errors import InvalidInput, short

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.].*)?", re.ASCII)
_DATA = re.compile(r"([kmgt]i?)?(b|[Bb]its?|B|[Bb]ytes?)(/s|ps|/sec)?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_TIMES = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    **dict.fromkeys(("min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_BITS = 1e6  # A link of a testbed must have a rate of at least 1 Mbit/s (_BITS).


class _Kind(NamedTuple):
    """A quantity, with a function that converts its units and a description of its values."""

    size: Callable[[str], float | None]
    allowed: str


def _data(unit: str, rate: bool) -> float | None:
    """Return the bytes of a data unit, or the bytes/s of a rate unit."""
    match = _DATA.fullmatch(unit)
    if match is None:
        return None
    prefix, base, per = (match[1] or "").lower(), match[2], match[3]
    bits = base == "b" or base.lower().startswith("bit")
    if not rate and (bits or per):
        return None
    return (1024.0 if prefix[1:] else 1000.0) ** _POWERS[prefix[:1]] / (8 if bits else 1)


_SECONDS = _Kind(_TIMES.get, "a number of seconds, or a time such as '5ms', '0.1s', '2min' or '1h'")
_BYTES = _Kind(
    lambda unit: _data(unit, rate=False),
    "a number of bytes, or a size such as '64KiB' or '4MB' (B means byte)",
)
_RATE = _Kind(
    lambda unit: _data(unit, rate=True),
    "a number of bytes/s, or a rate such as '1Gb/s', '100Mbit/s' or '10GB/s' (b means bit, B "
    "means byte)",
)


def parse_seconds(value: object, field: str = "time", allowed: str = _SECONDS.allowed) -> float:
    """Convert a number, or a text such as "5 ms", to seconds.

    Raises:
        InvalidInput: The value is no valid time; the message names the field.
    """
    return _parse(value, field, _SECONDS._replace(allowed=allowed))


def parse_limit(value: object, field: str = "timeout") -> float:
    """Convert a timeout to seconds; raise InvalidInput unless it is above 0."""
    if seconds := parse_seconds(value, field):
        return seconds
    raise _refusal(field, value, "more than 0 s")


def parse_bytes(value: object, field: str = "bytes") -> int:
    """Convert a number, or a text such as "64 KiB", to bytes.

    Raises:
        InvalidInput: The value is no valid size; the message names the field.
    """
    return round(_parse(value, field, _BYTES))


def parse_rate(value: object, field: str = "bandwidth") -> float:
    """Convert a number, or a text such as "1 Gb/s", to bytes/s.

    Raises:
        InvalidInput: The value is no valid rate; the message names the field.

    >>> parse_rate("1Gb/s"), parse_rate("10 GB/s")
    (125000000.0, 10000000000.0)
    """
    return _parse(value, field, _RATE)


def bits_of(rate: str, field: str = "rate") -> int:
    """Convert a text such as "1Gb/s" to bits/s; raise InvalidInput below 1 Mb/s.

    Raises:
        InvalidInput: The value is not a rate of at least 1 Mb/s; the message names the option
            `field`.
    """
    allowed = "a rate of at least 1Mb per second, such as 100Mb or 1Gb/s (b means bit)"
    known = _RATE._replace(allowed=allowed)
    if not isinstance(rate, str) or (bits := 8 * _parse(rate, field, known)) < _BITS:
        raise _refusal(field, rate, allowed)
    return round(bits)


def _refusal(field: str, value: object, allowed: str) -> InvalidInput:
    return InvalidInput(f"{field}={short(value)} is impossible; give {allowed}")


def _parse(value: object, field: str, kind: _Kind) -> float:
    number, unit = math.nan, ""
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = float(match[1]), re.sub(r"\s", "", match[2] or "")
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    size = kind.size(unit) if unit else 1.0
    result = _product(number, size) if size else math.nan
    if not 0 <= result < math.inf:
        raise _refusal(field, value, kind.allowed)
    return result


def _product(number: float, size: float) -> float:
    # A division by 1e6 rounds once, but a multiplication by 1e-6 rounds twice. For example, 50 /
    # 1e6 equals 5e-05, but 50 * 1e-6 does not.
    return number * size if size >= 1 else number / round(1 / size)
