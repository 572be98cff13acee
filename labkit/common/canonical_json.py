"""Canonical JSON of values; experiments with equal JSON compute the same result."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeAlias, TypeGuard

# `JSON` is the type of any value in a JSON file. Unlike list and dict, Sequence and Mapping are
# covariant, so a `dict[str, float]` also has the type `JSON`. Code that knows the fields of a
# record uses a TypedDict instead of `JSON`.
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

SCHEMA = 2  # version of the format of records that labkit writes

LONG = 2000  # maximum characters of a captured value's JSON; a checksum replaces longer JSON


def as_json(value: Any) -> JSON:
    """Return a value as JSON: callables by name, source and captured values, arrays by checksum."""
    # NumPy and pydantic are imported inside the function, because light commands such as `labkit
    # ls` also import this module.
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
    """Return a label: the name of a callable, the class name of a callable object, or "arrays"."""
    return getattr(value, "__name__", type(value).__name__) if callable(value) else "arrays"


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    # An interactive interpreter does not store the source of functions.
    except (OSError, TypeError):
        import cloudpickle

        return "sha256 " + hashlib.sha256(cloudpickle.dumps(function)).hexdigest()


def _function(function: Callable[..., Any], visited: list[FunctionType]) -> dict[str, JSON]:
    """Return name, source and captured values of a callable; skip functions already `visited`."""
    record: dict[str, JSON] = {"callable": label_of(function), "source": _source(function)}
    if not isinstance(function, FunctionType):
        return record
    visited.append(function)
    values: dict[str, JSON] = {}
    # The names are sorted, because equal functions must have equal JSON.
    for name, value in sorted(captured(function).items()):
        if any(value is other for other in visited):
            continue  # functions may call each other in a cycle, so visited ones are skipped
        if _is_in_same_module(value, function):
            values[name] = _function(value, visited)
        elif _is_plain(value):
            values[name] = _short(value)
    return record | ({"captured": values} if values else {})


def captured(function: FunctionType) -> dict[str, Any]:
    """Return the values that a function captures; functions with equal source may capture others.

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
    # The names are read from the bytecode, because `inspect.getclosurevars` ignores inner
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
        # An array of Python objects is not accepted, because its bytes are only memory addresses.
        return not getattr(value.dtype, "hasobject", False)
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
