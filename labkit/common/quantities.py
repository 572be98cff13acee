"""Seconds, bytes and rates as people write them: the one parser of units."""

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
_BITS = 1e6  # a second: links below are no testbed's


class _Kind(NamedTuple):
    """What is measured: the size of a unit in the base one, None for no such; words for errors."""

    size: Callable[[str], float | None]
    allowed: str


def _data(unit: str, rate: bool) -> float | None:
    """Bytes of a unit of data, or bytes/s of one of a rate; b is a bit, B a byte."""
    found = _DATA.fullmatch(unit)
    if found is None:
        return None
    prefix, base, per = (found[1] or "").lower(), found[2], found[3]
    bits = base == "b" or base.lower().startswith("bit")
    if not rate and (bits or per):
        return None
    return (1024.0 if prefix[1:] else 1000.0) ** _POWERS[prefix[:1]] / (8 if bits else 1)


_SECONDS = _Kind(_TIMES.get, "seconds, or a time such as '5ms', '0.1s', '2min' or '1h'")
_BYTES = _Kind(
    lambda unit: _data(unit, rate=False), "bytes, or such as '64KiB' or '4MB' (B is a byte)"
)
_RATE = _Kind(
    lambda unit: _data(unit, rate=True),
    "bytes/s, or a rate such as '1Gb/s', '100Mbit/s' or '10GB/s' (b is a bit, B a byte)",
)


def parse_seconds(value: object, field: str = "time", allowed: str = _SECONDS.allowed) -> float:
    """Seconds of a number, or of a text such as "5 ms". Raises: InvalidInput, naming the field."""
    return _parsed(value, field, _SECONDS._replace(allowed=allowed))


def parse_limit(value: object, field: str = "limit") -> float:
    """The same, above 0: how long a wait may last."""
    if seconds := parse_seconds(value, field):
        return seconds
    raise _refusal(field, value, "more than 0 s")


def parse_bytes(value: object, field: str = "bytes") -> int:
    """Bytes of a number, or of a text such as "64 KiB". Raises: InvalidInput, naming the field."""
    return round(_parsed(value, field, _BYTES))


def parse_rate(value: object, field: str = "bandwidth") -> float:
    """Bytes/s of a number, or of a text such as "1 Gb/s". Raises: InvalidInput, naming the field.

    >>> parse_rate("1Gb/s"), parse_rate("10 GB/s")
    (125000000.0, 10000000000.0)
    """
    return _parsed(value, field, _RATE)


def bits_of(rate: str, field: str = "rate") -> int:
    """Bits/s of the text of a rate, 1 Mb/s or more. Raises: InvalidInput, naming the field."""
    allowed = "bits a second from 1Mb up, such as 100Mb or 1Gb/s"
    known = _RATE._replace(allowed=allowed)
    if not isinstance(rate, str) or (bits := 8 * _parsed(rate, field, known)) < _BITS:
        raise _refusal(field, rate, allowed)
    return round(bits)


def _refusal(field: str, value: object, allowed: str) -> InvalidInput:
    return InvalidInput(f"{field}={short(value)} is impossible; give {allowed}")


def _parsed(value: object, field: str, kind: _Kind) -> float:
    number, unit = math.nan, ""
    if isinstance(value, str) and (found := _QUANTITY.fullmatch(value)):
        number, unit = float(found[1]), re.sub(r"\s", "", found[2] or "")
    elif isinstance(value, Real) and not isinstance(value, bool):
        number = float(value)
    size = kind.size(unit) if unit else 1.0
    result = _product(number, size) if size else math.nan
    if not 0 <= result < math.inf:
        raise _refusal(field, value, kind.allowed)
    return result


def _product(number: float, size: float) -> float:
    # By division, which rounds once: 50 / 1e6 is 5e-05, but 50 * 1e-6 is not.
    return number * size if size >= 1 else number / round(1 / size)
