"""The type of a parameter without annotation, inferred from the syntax of its default."""

from __future__ import annotations

import ast
from collections.abc import Mapping

UNTYPED = ""  # annotation of a parameter whose type only the kernel can determine

_DISPLAYS = {
    ast.JoinedStr: "str", ast.List: "list", ast.ListComp: "list", ast.Tuple: "tuple",
    ast.Dict: "dict", ast.DictComp: "dict", ast.Set: "set", ast.SetComp: "set",
    ast.Compare: "bool",
}  # fmt: skip
_TYPES = {
    *("bool", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("date", "datetime", "time", "timedelta", "Decimal", "Fraction", "Path", "UUID"),
}
# Return types of functions and methods, by the last component of their names.
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
    # If one operand has such a type, the result has the same type: `"%d" % n`, `folder / name`,
    # `[0] * 3`, `today - days`.
    return next((kind for kind in _DOMINANT if kind in (left_type, right_type)), UNTYPED)


def _infer_call(function: ast.expr, arguments: list[ast.expr], known: Mapping[str, str]) -> str:
    """Return the type of a call, such as `Path("a")`, `Path.home()` or `datetime.date.today()`."""
    name = _last_name(function)
    owner = _last_name(function.value) if isinstance(function, ast.Attribute) else ""
    if owner == "environ" and name == "get":
        return "str"
    if owner == "time" and name not in _RETURNS:  # functions of the module `time` return floats
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
