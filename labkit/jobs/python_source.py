"""Parameter values as Python source that needs no imports in the notebook."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from uuid import UUID

# Expressions that create a value from its text. datetime precedes its base class date, because the
# first match is used.
_CONSTRUCTORS = {
    datetime: "__import__('datetime').datetime.fromisoformat({!r})",
    date: "__import__('datetime').date.fromisoformat({!r})",
    time: "__import__('datetime').time.fromisoformat({!r})",
    Decimal: "__import__('decimal').Decimal({!r})",
    Fraction: "__import__('fractions').Fraction({!r})",
    PurePath: "__import__('pathlib').Path({!r})",
    UUID: "__import__('uuid').UUID({!r})",
}


def python_source(value: object) -> str:
    """Return a Python expression whose value equals the given value.

    >>> python_source({"sizes": (3, 4), "limit": math.inf})
    "{'sizes': (3, 4), 'limit': float('inf')}"
    """
    match value:
        case dict():
            pairs = (f"{python_source(k)}: {python_source(v)}" for k, v in value.items())
            return f"{{{', '.join(pairs)}}}"
        case list():
            return f"[{', '.join(map(python_source, value))}]"
        case tuple():
            items = ", ".join(map(python_source, value))
            return f"({items},)" if len(value) == 1 else f"({items})"
        case set() | frozenset():
            items = ", ".join(sorted(map(python_source, value)))
            return f"{type(value).__name__}([{items}])"
        case float() if not math.isfinite(value):
            return f"float('{value}')"
        case timedelta():
            return f"__import__('datetime').{repr(value).removeprefix('datetime.')}"
    form = next((text for kind, text in _CONSTRUCTORS.items() if isinstance(value, kind)), None)
    return repr(value) if form is None else form.format(str(value))
