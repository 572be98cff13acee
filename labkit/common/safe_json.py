"""A JSON reader for untrusted records and notebooks, with limits on size, depth and values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, short

DEEPEST = 60  # maximum nesting depth of brackets; figures in notebooks need about 20
MOST_VALUES = 2**21  # maximum number of values in a text; metrics of 100,000 epochs need a million
MOST_NAMES = 10_000  # maximum number of keys of a JSON object
LONGEST_NAME = 1_000  # maximum characters of a key
# LONGEST_TEXT is the maximum number of characters of a string. The source of a model has some
# thousand characters. A browser takes minutes to show strings longer than the limit.
LONGEST_TEXT = 1_000_000
LARGEST = 10**18  # bound of the absolute value of integers, which then fit into 64 bits
_LONE = re.compile(r"[\ud800-\udfff]")


class NotPlain(InvalidInput):
    """Raised for text that is no valid JSON or YAML, or that exceeds labkit's limits."""


def read_plain_json(content: bytes, strict: bool = True) -> JSON:
    """Return the value of a JSON text.

    Args:
        content: The JSON text, as UTF-8 bytes.
        strict: Whether to reject values that other JSON readers reject: numbers that are not finite
            or exceed 64 bits, lone surrogates, very long keys. `strict` is False for notebooks,
            which may contain values that other JSON readers reject.

    Raises:
        NotPlain: The text is not JSON, or it exceeds the limits on the number or the nesting of
            values.
    """
    # Values are counted before parsing, because a parsed list needs twenty times the memory of its
    # text.
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise NotPlain(f"has about {values:,} JSON values; allowed are at most {MOST_VALUES:,}")
    try:
        constant = _refuse if strict else None
        value: JSON = json.loads(content.decode(), parse_constant=constant)
    except UnicodeDecodeError:
        raise NotPlain("cannot be read as JSON, because it is not UTF-8 text") from None
    except RecursionError:
        raise NotPlain(_TOO_DEEP) from None
    except NotPlain:
        raise
    except ValueError as error:
        raise NotPlain(f"cannot be read: {error}") from error
    if reason := _unlike_plain(value, strict):
        raise NotPlain(reason)
    return value


_TOO_DEEP = f"has more than {DEEPEST} levels of nested brackets"


def _refuse(constant: str) -> NoReturn:
    raise NotPlain(f"contains {constant}, which JSON does not allow as a number")


def _unlike_plain(value: JSON, strict: bool) -> str | None:
    """Return why a JSON value exceeds the limits, or None; not recursive, so any depth is safe."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        if strict:
            for item in level:
                if reason := _odd(item):
                    return reason
        level = list(_inside(level))
        if not level:
            return None
    return _TOO_DEEP


def _inside(level: Iterable[Any]) -> Iterator[Any]:
    """Yield the values that are directly inside the given lists and objects."""
    for item in level:
        if isinstance(item, dict):
            yield from item.values()
        elif isinstance(item, list):
            yield from item


def _odd(value: Any) -> str | None:
    """Return why a single value exceeds the limits, or None; nested values are not checked."""
    if isinstance(value, dict):
        return _odd_names(value)
    if isinstance(value, str):
        return _odd_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "contains a number that exceeds the range of 64-bit floats"
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return (
            f"contains a whole number of {len(str(abs(value)))} digits; allowed are at most "
            "18 digits"
        )
    return None


def _odd_text(text: str) -> str | None:
    if len(text) > LONGEST_TEXT:
        return f"contains a text of {len(text):,} characters; allowed are at most {LONGEST_TEXT:,}"
    return (
        None
        if is_text(text)
        else f"contains the text {text[:60]!r}, which has an unpaired Unicode surrogate"
    )


def _odd_names(record: dict[str, Any]) -> str | None:
    if len(record) > MOST_NAMES:
        return f"contains an object of {len(record):,} names; allowed are at most {MOST_NAMES:,}"
    for name in record:
        if len(name) > LONGEST_NAME:
            return (
                f"contains a name of {len(name):,} characters; allowed are at most {LONGEST_NAME:,}"
            )
        if not is_text(name):
            return f"contains the name {short(name)}, which has an unpaired Unicode surrogate"
    return None


def is_text(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8."""
    return text.isascii() or not _LONE.search(text)
