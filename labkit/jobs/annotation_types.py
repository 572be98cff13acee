"""Types of parameters, which labkit reads from the notebook's syntax without executing code."""

from __future__ import annotations

import ast
import math
import typing
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeAlias
from uuid import UUID

from pydantic import BeforeValidator, PositiveInt

Kind: TypeAlias = Any  # A `Kind` is a Python type, or a special form of the module `typing`.

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
    """Return a date type that reads text only in ISO format, not as seconds since 1970."""
    return Annotated[
        kind, BeforeValidator(lambda v: kind.fromisoformat(v) if isinstance(v, str) else v)
    ]


_TEMPORAL: dict[str, Kind] = {kind.__name__: _temporal(kind) for kind in (date, datetime, time)}
NAMED: dict[str, Kind] = PLAIN | _TEXTUAL | _TEMPORAL | {n: getattr(typing, n) for n in _GENERIC}
NAMED["PositiveInt"] = PositiveInt
# The maximum length of an annotation, in characters, also limits the depth of nested brackets.
LONGEST = 1000


class NoType(ValueError):
    """The error for an annotation with a type that a parameter may not have."""


def read(annotation: str) -> Kind:
    """Return the type of an annotation like `list[int]`, `Literal["a", "b"]`, `float | None`.

    Raises:
        NoType: The annotation is not Python, or has more than 1,000 characters. An annotation with
            an unknown type also causes the error.
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
        # An annotation may be in quotes, as in `list["int"]`.
        case ast.Constant(value=str() as text):
            return read(text)
        case ast.Name(id=name) if name in NAMED:
            return NAMED[name]
        # The function ignores module names: `typing.Optional` and `t.Optional` mean the same, as do
        # `datetime.date` and `date`.
        case ast.Attribute(value=ast.Name(), attr=name) if name in NAMED:
            return NAMED[name]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            # `typing.Union` accepts all types, but the operator `|` fails if both operands are
            # None.
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


UNTYPED = ""  # A parameter has an empty annotation if only the kernel can determine its type.

_DISPLAYS = {
    ast.JoinedStr: "str", ast.List: "list", ast.ListComp: "list", ast.Tuple: "tuple",
    ast.Dict: "dict", ast.DictComp: "dict", ast.Set: "set", ast.SetComp: "set",
    ast.Compare: "bool",
}  # fmt: skip
_TYPES = {
    *("bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("date", "datetime", "time", "timedelta", "Decimal", "Fraction", "Path", "UUID"),
}
# `_RETURNS` gives the return types of common functions, by function name.
_RETURNS = {
    "sorted": "list", "len": "int", "cpu_count": "int", "uuid4": "UUID",
    **dict.fromkeys(("capitalize", "format", "getenv", "isoformat", "join", "lower"), "str"),
    **dict.fromkeys(("replace", "strftime", "strip", "title", "upper", "zfill"), "str"),
}  # fmt: skip
_DOMINANT = ("Path", "str", "list", "tuple", "datetime", "date", "timedelta", "Decimal")
_CONSTANTS = {"inf": "float", "nan": "float", "pi": "float", "e": "float", "parent": "Path"}


def infer(node: ast.expr, annotations: Mapping[str, str]) -> str:
    """Return the annotation that fits a parameter's default; UNTYPED if the type is unknown.

    Args:
        node: Syntax tree of the default.
        annotations: Annotations of the preceding parameters, by name.

    >>> infer(ast.parse("float('inf')", mode="eval").body, {})
    'float'
    """
    match node:
        case ast.Constant(value=None):
            return "Any"
        case ast.Constant(value=value):
            return type(value).__name__
        case ast.Name(id=name):
            return annotations.get(name, UNTYPED)
        case ast.Attribute(attr=name):
            return _CONSTANTS.get(name, UNTYPED)
        case ast.Subscript(value=ast.Attribute(attr="environ")):
            return "str"
        case ast.Call(func=function, args=arguments):
            return _infer_call(function, arguments, annotations)
        case ast.UnaryOp() | ast.BoolOp() | ast.IfExp() | ast.BinOp():
            return _infer_operator(node, annotations)
    return _DISPLAYS.get(type(node), UNTYPED)


def _infer_operator(node: ast.expr, known: Mapping[str, str]) -> str:
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return "bool"
        case ast.UnaryOp(operand=operand):
            return infer(operand, known)
        case ast.BoolOp(values=values):
            return _common(*(infer(value, known) for value in values))
        case ast.IfExp(body=body, orelse=other):
            return _common(infer(body, known), infer(other, known))
        case ast.BinOp(op=ast.Pow(), right=ast.UnaryOp(op=ast.USub())):
            return "float"  # a power with a negative exponent is a float: `10 ** -3`
        case ast.BinOp(left=left, op=op, right=right):
            return _arithmetic(infer(left, known), op, infer(right, known))
    return UNTYPED


def _common(first: str, *others: str) -> str:
    return first if all(other == first for other in others) else UNTYPED


def _arithmetic(left_type: str, op: ast.operator, right_type: str) -> str:
    if {left_type, right_type} <= {"int", "float", "bool"}:
        whole = {left_type, right_type} <= {"int", "bool"} and not isinstance(op, ast.Div)
        return "int" if whole else "float"
    if left_type == right_type:
        return "timedelta" if left_type in ("date", "datetime") else left_type
    # The result has the type of an operand whose type is in `_DOMINANT`. Two examples are `folder /
    # name` and `[0] * 3`.
    return next((kind for kind in _DOMINANT if kind in (left_type, right_type)), UNTYPED)


def _infer_call(function: ast.expr, arguments: list[ast.expr], known: Mapping[str, str]) -> str:
    """Return the type of a call, such as `Path("a")`, `Path.home()` or `datetime.date.today()`."""
    name = _last_name(function)
    owner = _last_name(function.value) if isinstance(function, ast.Attribute) else ""
    if owner == "environ" and name == "get":
        return "str"
    # The code assumes that functions of the module `time`, such as `monotonic`, return floats.
    if owner == "time" and name not in _RETURNS:
        return "float"
    if name == "replace" and isinstance(function, ast.Attribute):
        return infer(function.value, known)  # the method `replace` returns the type of its object
    if name in _TYPES or name in _RETURNS:
        return _RETURNS.get(name, name)
    if name in ("abs", "max", "min") and arguments:
        kind = _common(*(infer(argument, known) for argument in arguments))
        return kind if kind in ("int", "float") else UNTYPED
    if isinstance(function, ast.Attribute) and infer(function.value, known) == "Path":
        return "Path"  # a method of a Path is assumed to return a Path: `Path("a").resolve()`
    return owner if owner in _TYPES else UNTYPED


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


# Each expression in `_CONSTRUCTORS` creates a value from its text. datetime precedes its base class
# date, because the first match is used.
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
