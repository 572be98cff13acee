"""What a value is, as JSON: what has equal JSON computes the same."""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeAlias, TypeGuard

# What a file of JSON may hold. Sequence and Mapping, not list and dict: so a `dict[str, float]`
# fits, too. Who reads such a file knows more than this, and says so with a TypedDict.
JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

LONG = 2000  # letters of a value that a function brings along; a longer one is a checksum


def as_json(value: Any) -> JSON:
    """A value as JSON: callables by name, source and what they bring along, arrays by checksum."""
    # Inside: whatever names a file's content imports this module, `labkit ls` too.
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
        # Its bytes in one order: a view and its copy are the same data.
        array = np.ascontiguousarray(value)
        # Only its checksum: a data set has no place in a record.
        checksum = hashlib.sha256(array.tobytes()).hexdigest()
        return {"shape": list(array.shape), "dtype": str(array.dtype), "sha256": checksum}
    known: JSON = value
    return known


def digest(record: JSON) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def is_number(value: JSON) -> TypeGuard[float]:
    """Whether a value is a number; True, which Python counts among them, is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def label_of(value: Any) -> str:
    """The name of a callable; of what has none, its kind."""
    return getattr(value, "__name__", type(value).__name__) if callable(value) else "arrays"


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed into a bare interpreter: its code stands for its source
        import cloudpickle

        return "sha256 " + hashlib.sha256(cloudpickle.dumps(function)).hexdigest()


def _function(function: Callable[..., Any], told: list[FunctionType]) -> dict[str, JSON]:
    """Name and source of a callable, and what it brings along; `told` are those already said."""
    found: dict[str, JSON] = {"callable": label_of(function), "source": _source(function)}
    if not isinstance(function, FunctionType):
        return found
    told.append(function)
    own: dict[str, JSON] = {}
    # Sorted: the same function has the same text, in whatever order Python found its names.
    for name, value in sorted(_captured(function).items()):
        if any(value is function_type for function_type in told):
            continue  # each once: functions may call each other in any way
        if _is_beside(value, function):
            own[name] = _function(value, told)
        elif _is_plain(value):
            own[name] = _short(value)
    return found | ({"captured": own} if own else {})


def _captured(function: FunctionType) -> dict[str, Any]:
    """What a function finds outside of itself: two models may differ in nothing else.

    Defaults, names of the functions around it, and globals, such as a notebook's parameters.
    """
    parameters = inspect.signature(function).parameters.values()
    values = {p.name: p.default for p in parameters if p.default is not p.empty}
    known = function.__globals__
    values |= {name: known[name] for name in _globals(function.__code__) if name in known}
    return values | dict(inspect.getclosurevars(function).nonlocals)


def _globals(code: CodeType) -> set[str]:
    """The global names that a function reads, and the functions inside it."""
    # From the bytecode: `getclosurevars` does not look into the functions inside a function.
    own = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
    }
    inner = [_globals(const) for const in code.co_consts if isinstance(const, CodeType)]
    return own.union(*inner)


def _is_beside(value: Any, function: FunctionType) -> TypeGuard[FunctionType]:
    """Whether a value is a function of the same notebook or file as another."""
    return isinstance(value, FunctionType) and value.__module__ == function.__module__


def _short(value: Any) -> JSON:
    """The value as JSON, or the checksum of a long one."""
    record = as_json(value)
    text = json.dumps(record)
    if len(text) <= LONG:
        return record
    return {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _is_plain(value: Any) -> bool:
    if hasattr(value, "__array__") and hasattr(value, "dtype"):
        return not getattr(value.dtype, "hasobject", False)  # of objects, only addresses
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
