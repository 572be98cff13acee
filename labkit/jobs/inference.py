"""The type of a parameter that has no annotation, read from the syntax of its default."""

from __future__ import annotations

import ast
from collections.abc import Mapping

COMPUTED = ""  # the annotation of a default whose type only the kernel knows

_DISPLAYS = {
    ast.JoinedStr: "str", ast.List: "list", ast.ListComp: "list", ast.Tuple: "tuple",
    ast.Dict: "dict", ast.DictComp: "dict", ast.Set: "set", ast.SetComp: "set",
    ast.Compare: "bool",
}  # fmt: skip
_TYPES = {
    *("bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("date", "datetime", "time", "timedelta", "Decimal", "Fraction", "Path", "UUID"),
}
# What functions return, and what constants are, by the last part of their name.
_RETURNS = {
    "sorted": "list", "len": "int", "cpu_count": "int", "uuid4": "UUID",
    **dict.fromkeys(("capitalize", "format", "getenv", "isoformat", "join", "lower"), "str"),
    **dict.fromkeys(("replace", "strftime", "strip", "title", "upper", "zfill"), "str"),
}  # fmt: skip
_CONSTANTS = {"inf": "float", "nan": "float", "pi": "float", "e": "float", "parent": "Path"}


def infer(node: ast.expr, known: Mapping[str, str]) -> str:
    """Return the annotation that a default would have, or COMPUTED.

    Args:
        node: the default.
        known: annotations of the parameters before it.

    >>> infer(ast.parse("float('inf')", mode="eval").body, {})
    'float'
    """
    match node:
        case ast.Constant(value=None):
            return "Any"
        case ast.Constant(value=value):
            return type(value).__name__
        case ast.Name(id=name):
            return known.get(name, COMPUTED)
        case ast.Attribute(attr=name):
            return _CONSTANTS.get(name, COMPUTED)
        case ast.Subscript(value=ast.Attribute(attr="environ")):
            return "str"
        case ast.Call(func=function, args=arguments):
            return _called(function, arguments, known)
        case ast.UnaryOp() | ast.BoolOp() | ast.IfExp() | ast.BinOp():
            return _computed(node, known)
    return _DISPLAYS.get(type(node), COMPUTED)


def _computed(node: ast.expr, known: Mapping[str, str]) -> str:
    match node:
        case ast.UnaryOp(op=ast.Not()):
            return "bool"
        case ast.UnaryOp(operand=operand):
            return infer(operand, known)
        case ast.BoolOp(values=values):
            return _same(*(infer(value, known) for value in values))
        case ast.IfExp(body=body, orelse=other):
            return _same(infer(body, known), infer(other, known))
        case ast.BinOp(op=ast.Pow(), right=ast.UnaryOp(op=ast.USub())):
            return "float"  # 10 ** -3
        case ast.BinOp(left=left, op=op, right=right):
            return _operation(infer(left, known), op, infer(right, known))
    return COMPUTED


def _same(first: str, *others: str) -> str:
    return first if all(other == first for other in others) else COMPUTED


def _operation(left: str, op: ast.operator, right: str) -> str:
    if {left, right} <= {"int", "float", "bool"}:
        whole = {left, right} <= {"int", "bool"} and not isinstance(op, ast.Div)
        return "int" if whole else "float"
    # Of a text or a path with anything: `"%d" % n`, `"-" * 3`, `folder / name`.
    return next((kind for kind in ("Path", "str") if kind in (left, right)), _same(left, right))


def _called(function: ast.expr, arguments: list[ast.expr], known: Mapping[str, str]) -> str:
    """The type that a call returns: `Path("a")`, `Path.home()`, `datetime.date.today()`."""
    name = _last(function)
    owner = _last(function.value) if isinstance(function, ast.Attribute) else ""
    if owner == "environ" and name == "get":
        return "str"
    if owner == "time" and name not in _RETURNS:  # `time.time()`, of the module
        return "float"
    if name in _TYPES or name in _RETURNS:
        return _RETURNS.get(name, name)
    if name in ("abs", "max", "min") and arguments:
        kind = _same(*(infer(each, known) for each in arguments))
        return kind if kind in ("int", "float") else COMPUTED
    if isinstance(function, ast.Attribute) and infer(function.value, known) == "Path":
        return "Path"  # `Path("a").resolve()`
    return owner if owner in _TYPES else COMPUTED


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
