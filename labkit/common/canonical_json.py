"""Canonical JSON of values; experiments with equal JSON compute the same result."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NoReturn, TypeAlias, TypeGuard

from labkit.common.errors import InvalidInput, short

# Unlike list and dict, Sequence and Mapping are covariant, so a `dict[str, float]` also has the
# type `JSON`. Code that knows the fields of a record uses a TypedDict instead of `JSON`.
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEMA = 2  # The constant SCHEMA is the version of the format in which labkit writes records.

# A checksum replaces the JSON of a function's captured value above 2000 characters (LONG).
LONG = 2000


def as_json(value: Any) -> JSON:
    """Return a value as JSON, which contains the source of callables and the checksum of arrays."""
    # `as_json` itself imports NumPy and pydantic, because light commands such as `labkit ls` also
    # import the module `canonical_json`.
    import numpy as np
    from pydantic import BaseModel

    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, BaseModel):
        fields: dict[str, JSON] = value.model_dump(mode="json")
        return fields
    if callable(value):
        return _function(value, [])
    if isinstance(value, np.generic):
        value = value.item()
    elif hasattr(value, "shape"):
        # The array is made contiguous, so that a view and its copy give the same bytes.
        array = np.ascontiguousarray(value)
        # Only the checksum of an array is stored, because a data set is too large for a record.
        checksum = hashlib.sha256(array.tobytes()).hexdigest()
        return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": checksum}
    known: JSON = value
    return known


def digest(record: JSON) -> str:
    """Return the SHA-256 of a JSON value, as hexadecimal text."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def is_number(value: JSON) -> TypeGuard[float]:
    """Return whether a value is a number; Booleans do not count as numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def label_of(value: Any) -> str:
    """Return the name of a callable or of its class, or "arrays" if the value is not callable."""
    return getattr(value, "__name__", type(value).__name__) if callable(value) else "arrays"


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    # An interactive interpreter does not store the source of functions.
    except (OSError, TypeError):
        import cloudpickle

        return "sha256 " + hashlib.sha256(cloudpickle.dumps(function)).hexdigest()


def _function(function: Callable[..., Any], visited: list[FunctionType]) -> dict[str, JSON]:
    """Return the name, source and captured values of a callable, without functions in `visited`."""
    record: dict[str, JSON] = {"callable": label_of(function), "source": _source(function)}
    if not isinstance(function, FunctionType):
        return record
    visited.append(function)
    values: dict[str, JSON] = {}
    # `_function` sorts the names of captured values, because equal functions must have equal JSON.
    for name, value in sorted(captured(function).items()):
        if any(value is other for other in visited):
            # Functions may call each other in a cycle, so `_function` skips functions that it has
            # already visited.
            continue
        if _is_in_same_module(value, function):
            values[name] = _function(value, visited)
        elif _is_plain(value):
            values[name] = _short(value)
    return record | ({"captured": values} if values else {})


def captured(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function captures, which may differ for functions of equal source.

    Captured values are the function's default arguments, variables of enclosing functions, and
    globals such as a notebook's parameters.
    """
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    known = function.__globals__
    values |= {name: known[name] for name in _globals(function.__code__) if name in known}
    return values | dict(inspect.getclosurevars(function).nonlocals)


def _globals(code: CodeType) -> set[str]:
    """Return the global names that a function and its inner functions read."""
    # `_globals` reads the names from the bytecode, because `inspect.getclosurevars` ignores inner
    # functions.
    names = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    inner = [_globals(const) for const in code.co_consts if isinstance(const, CodeType)]
    return names.union(*inner)


def _is_in_same_module(value: Any, function: FunctionType) -> TypeGuard[FunctionType]:
    """Return whether a value is a function of the same notebook or module as `function`."""
    return isinstance(value, FunctionType) and value.__module__ == function.__module__


def _short(value: Any) -> JSON:
    """Return the value as JSON, or the checksum of its JSON if the JSON is too long."""
    record = as_json(value)
    text = json.dumps(record)
    if len(text) <= LONG:
        return record
    return {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _is_plain(value: Any) -> bool:
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        # labkit records no array of Python objects, because the bytes of such an array are only
        # memory addresses.
        return not getattr(value.dtype, "hasobject", False)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


# A JSON text may have at most 60 levels of brackets (DEEPEST). Figures in notebooks need about 20
# levels of brackets.
DEEPEST = 60
# A JSON text may contain at most 2**21 values (MOST_VALUES); metrics of 100,000 epochs need a
# million values.
MOST_VALUES = 2**21
MOST_NAMES = 10_000  # A JSON object may have at most 10,000 keys (MOST_NAMES).
LONGEST_NAME = 1_000  # A key of a JSON object may have at most 1,000 characters (LONGEST_NAME).
# A string in a JSON text may have at most a million characters (LONGEST_TEXT). The source code of a
# model has a few thousand characters. A browser takes minutes to show a string with more than a
# million characters.
LONGEST_TEXT = 1_000_000
# Integers in JSON must be between -10**18 and 10**18 (LARGEST), so that they fit into 64 bits.
LARGEST = 10**18
_LONE = re.compile(r"[\ud800-\udfff]")


class NotPlain(InvalidInput):
    """Raised for text that is no valid JSON or YAML, or that exceeds labkit's limits."""


def read_plain_json(content: bytes, strict: bool = True) -> JSON:
    """Return the value of a JSON text.

    Args:
        content: The JSON text, as UTF-8 bytes.
        strict: Whether to reject values that other JSON readers reject. Other JSON readers reject
            infinite numbers, integers above 64 bits and lone surrogates. `strict` is False for
            notebooks, which may contain values that other JSON readers reject.

    Raises:
        NotPlain: The text is not JSON, or has too many values or levels.
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
    """Return the reason why a JSON value or a nested value exceeds the limits, or None."""
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
    """Return the reason why a single value exceeds the limits, or None; ignore nested values."""
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
