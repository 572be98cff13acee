"""The type that an annotation names, read from its syntax: nothing of a notebook is evaluated."""

from __future__ import annotations

import ast
import typing
from collections.abc import Callable
from typing import Any, TypeAlias

from pydantic import PositiveInt

Kind: TypeAlias = Any  # what typing makes of types; Python has no better name for all of them

PLAIN: dict[str, Kind] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, str, tuple)
}
NAMED: dict[str, Kind] = PLAIN | {
    name: getattr(typing, name) for name in ("Any", "Literal", "Optional", "Union", "List", "Dict")
}
NAMED["PositiveInt"] = PositiveInt
LONGEST = 1000  # letters; also bounds how deeply brackets can stand in each other


class NoType(ValueError):
    """An annotation is not made of the types that a parameter may have."""


def read(annotation: str) -> Kind:
    """Return the type of `list[int]`, `Literal["a", "b"]`, `float | None` and their like.

    Raises:
        NoType: it names anything else, is longer than 1,000 letters, or is not Python.
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
        case ast.Constant(value=str() as text):  # `list["int"]`
            return read(text)
        case ast.Name(id=name) if name in NAMED:
            return NAMED[name]
        case ast.Attribute(value=ast.Name(id="typing"), attr=name) if name in NAMED:
            return NAMED[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return typing.Union[_kind(left), _kind(right)]  # noqa: UP007 - of values, not names
        case ast.Subscript(value=outer, slice=inner):
            return _subscript(_kind(outer), inner)
    raise NoType(f"{ast.unparse(node)[:60]} is none of {', '.join(sorted(NAMED))}")


def _subscript(outer: Kind, inner: ast.expr) -> Kind:
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    one: Callable[[ast.expr], Kind] = _choice if outer is typing.Literal else _item
    kinds = [one(part) for part in parts]
    return outer[kinds[0] if len(kinds) == 1 else tuple(kinds)]


def _choice(node: ast.expr) -> str | int | bool | None:
    """One choice of a Literal."""
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | int):
        return value
    raise NoType(f"{value!r} is no choice of a Literal")


def _item(node: ast.expr) -> Kind:
    """A type in brackets; `tuple[int, ...]` has three dots there."""
    return ... if isinstance(node, ast.Constant) and node.value is ... else _kind(node)
