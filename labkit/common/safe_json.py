"""JSON of records and notebooks, read as plain data: bounded in number, depth and meaning."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, short

DEEPEST = 60  # brackets in each other; those of figures in notebooks have some twenty
MOST_VALUES = 2**21  # of a text; metrics of a hundred thousand epochs have a million
MOST_NAMES = 10_000  # of one record
LONGEST_NAME = 1_000  # letters
# Letters; the source of a model has some thousands, and over more a browser takes minutes.
LONGEST_TEXT = 1_000_000
LARGEST = 10**18  # what every reader's 64 bits hold, with room to count
_LONE = re.compile(r"[\ud800-\udfff]")


class NotPlain(InvalidInput):
    """A text is no JSON or YAML, or holds what plain data do not."""


def read_plain_json(content: bytes, strict: bool = True) -> JSON:
    """Return the value of a text.

    Args:
        content: UTF-8.
        strict: refuse also what other readers than Python's do: numbers that are not finite or
            beyond 64 bits, half characters, names of thousands of letters. Notebooks may have them.

    Raises:
        NotPlain: the text is not JSON, or has more or deeper values than data of labkit's.
    """
    # Counted before anything is built: a short list takes twenty times the bytes of its text.
    values = sum(map(content.count, (b",", b"[", b"{")))
    if values > MOST_VALUES:
        raise NotPlain(f"has about {values:,} values; allowed are {MOST_VALUES:,}")
    try:
        constant = _refuse if strict else None
        value: JSON = json.loads(content.decode(), parse_constant=constant)
    except UnicodeDecodeError:
        raise NotPlain("cannot be read: it is not UTF-8 text") from None
    except RecursionError:
        raise NotPlain(_TOO_DEEP) from None
    except NotPlain:
        raise
    except ValueError as error:
        raise NotPlain(f"cannot be read: {error}") from error
    if reason := _unlike_plain(value, strict):
        raise NotPlain(reason)
    return value


_TOO_DEEP = f"has more than {DEEPEST} brackets in each other"


def _refuse(constant: str) -> NoReturn:
    raise NotPlain(f"holds {constant}, which is no number of JSON's")


def _unlike_plain(value: JSON, strict: bool) -> str | None:
    """Return what of a value is not plain; level by level, for recursion has a limit."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        if strict:
            for each in level:
                if reason := _odd(each):
                    return reason
        level = list(_inside(level))
        if not level:
            return None
    return _TOO_DEEP


def _inside(level: Iterable[Any]) -> Iterator[Any]:
    """Yield the values one bracket further in."""
    for each in level:
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, list):
            yield from each


def _odd(value: Any) -> str | None:
    """Return what is wrong with one value, without those in it."""
    if isinstance(value, dict):
        return _odd_names(value)
    if isinstance(value, str):
        return _odd_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "holds a number beyond those of 64 bits"
    if isinstance(value, int) and not -LARGEST < value < LARGEST:
        return f"holds a whole number of {len(str(abs(value)))} digits; allowed are 18"
    return None


def _odd_text(text: str) -> str | None:
    if len(text) > LONGEST_TEXT:
        return f"holds a text of {len(text):,} letters; allowed are {LONGEST_TEXT:,}"
    return None if is_text(text) else f"holds {text[:60]!r}, which is not whole text"


def _odd_names(record: dict[str, Any]) -> str | None:
    if len(record) > MOST_NAMES:
        return f"has a record of {len(record):,} names; allowed are {MOST_NAMES:,}"
    for name in record:
        if len(name) > LONGEST_NAME:
            return f"has a name of {len(name):,} letters; allowed are {LONGEST_NAME:,}"
        if not is_text(name):
            return f"has the name {short(name)}, which is not whole text"
    return None


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8."""
    return text.isascii() or not _LONE.search(text)
