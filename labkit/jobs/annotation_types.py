"""The type that a parameter's annotation names, read from the syntax without executing code."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from pydantic import BeforeValidator, PositiveInt

Kind: TypeAlias = Any  # a type, or a special form of the module typing

PLAIN: dict[str, Kind] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, str, tuple)
}
_GENERIC = (
    *("Annotated", "Any", "Dict", "Final", "FrozenSet", "List", "Literal", "Mapping", "Optional"),
    *("Sequence", "Set", "Tuple", "Union"),
)
# Values of types without a JSON equivalent are stored as text that the type's constructor or
# `fromisoformat` accepts.
_TEXTUAL: dict[str, Kind] = {
    kind.__name__: kind for kind in (Decimal, Fraction, Path, UUID, complex, frozenset, set)
} | {"timedelta": timedelta}


def _temporal(kind: Kind) -> Kind:
    """Return a date type that reads only ISO text; pydantic also reads seconds since 1970."""
    return Annotated[
        kind, BeforeValidator(lambda v: kind.fromisoformat(v) if isinstance(v, str) else v)
    ]


_TEMPORAL: dict[str, Kind] = {kind.__name__: _temporal(kind) for kind in (date, datetime, time)}
NAMED: dict[str, Kind] = PLAIN | _TEXTUAL | _TEMPORAL | {n: getattr(typing, n) for n in _GENERIC}
NAMED["PositiveInt"] = PositiveInt
# Maximum length of an annotation in characters, which also limits the depth of nested brackets.
LONGEST = 1000


class NoType(ValueError):
    """The error for an annotation that names a type which no parameter may have."""


def read(annotation: str) -> Kind:
    """Return the type of an annotation like `list[int]`, `Literal["a", "b"]`, `float | None`.

    Raises:
        NoType: The annotation names a type that is not in `NAMED`, has more than 1,000 characters,
            or is not Python.
    """
    if len(annotation) > LONGEST:
        raise NoType("too long")
    try:
        return _kind(ast.parse(annotation.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise NoType(str(error)) from error


def _kind(node: ast.expr) -> Kind:
    match node:
        case ast.Constant(value=None):
            return None
        case ast.Constant(value=str() as text):  # the annotation is in quotes, as in `list["int"]`
            return read(text)
        case ast.Name(id=name) if name in NAMED:
            return NAMED[name]
        # The name of the module is ignored, as in `typing.Optional`, `t.Optional` or
        # `datetime.date`.
        case ast.Attribute(value=ast.Name(), attr=name) if name in NAMED:
            return NAMED[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            # The members are values, not names, so `X | Y` cannot write the union.
            return typing.Union[_kind(left), _kind(right)]  # noqa: UP007
        case ast.Subscript(value=outer, slice=inner):
            return _subscript(_kind(outer), inner)
    raise NoType(f"{ast.unparse(node)[:60]} is none of {', '.join(sorted(NAMED))}")


def _subscript(outer: Kind, inner: ast.expr) -> Kind:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    # Only the first argument of Annotated or Final is a type.
    if outer in (Annotated, typing.Final):
        return _kind(parts[0])
    read_argument: Callable[[ast.expr], Kind] = _choice if outer is typing.Literal else _item
    kinds = [read_argument(part) for part in parts]
    return outer[kinds[0] if len(kinds) == 1 else tuple(kinds)]


def _choice(node: ast.expr) -> str | int | bool | None:
    """Return the value of one choice in a Literal annotation."""
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | int):
        return value
    raise NoType(f"{value!r} cannot be a choice of a Literal")


def _item(node: ast.expr) -> Kind:
    """Return a type argument, for example `int` or the ellipsis in `tuple[int, ...]`."""
    return ... if isinstance(node, ast.Constant) and node.value is ... else _kind(node)
