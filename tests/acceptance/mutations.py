"""Mutants of a module: each has one small change of the module's syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}

# A function that changes a node in place, or returns a new node instead.
Change: TypeAlias = Callable[[ast.AST], ast.AST]


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Attributes:
        file: Path of the file, relative to the parent folder of the package.
        line: Line number of the change.
        change: Code before and after the change.
        source: Source code of the whole file, including the change.
    """

    file: Path
    line: int
    change: str
    source: str


def mutants(file: Path, source: str) -> list[Mutant]:
    """Return all mutants of a file, in the order of lines."""
    tree = ast.parse(source)
    found = []
    for number, (node, change) in enumerate(_places(tree)):
        other: ast.AST = copy.deepcopy(tree)
        twin, _ = next(each for n, each in enumerate(_places(other)) if n == number)
        before, line = ast.unparse(node), getattr(node, "lineno", 0)
        new = change(twin)
        if new is not twin:
            other = _Exchange(twin, new).visit(other)
        changed = ast.unparse(ast.fix_missing_locations(other))
        words = f"{_short(before)} -> {_short(ast.unparse(new))}"
        found.append(Mutant(file, line, words, changed))
    return sorted(found, key=lambda mutant: mutant.line)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, Change]]:
    """Yield each node that can be changed, with its change; skip types and error messages."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if change := _change_of(node):
        yield node, change
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        # A type alias uses operators such as `|`, which compute nothing.
        if isinstance(node, ast.AnnAssign) and "TypeAlias" in ast.unparse(node.annotation):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _places(child)


def _change_of(node: ast.AST) -> Change | None:
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            return _swap_operator
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return _swap_comparison
        case ast.BoolOp():
            return _swap_and_or
        case ast.If() | ast.IfExp():
            return _negate
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return _one_more
        case ast.Expr(value=ast.Call()):
            return lambda node: ast.copy_location(ast.Pass(), node)
    return None


def _swap_operator(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BinOp | ast.AugAssign)
    node.op = OPERATORS[type(node.op)]()
    return node


def _swap_comparison(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops = [COMPARISONS[type(node.ops[0])]()]
    return node


def _swap_and_or(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BoolOp)
    node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node


def _negate(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.If | ast.IfExp)
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _one_more(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    node.value += 1
    return node


class _Exchange(ast.NodeTransformer):
    """A transformer of syntax trees that replaces one node by another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        """Return the new node if this is the old node."""
        if node is self._old:
            return self._new
        self.generic_visit(node)
        return node


def _short(text: str) -> str:
    first = text.splitlines()[0]
    return first if len(first) <= 60 else f"{first[:57]}..."
