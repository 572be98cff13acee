"""The cluster that a notebook starts first, read from its cells before they run."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.common.errors import InvalidInput
from labkit.jobs import cells
from labkit.jobs.parameters import UNKNOWN, Values, declared

if TYPE_CHECKING:
    from labkit.cluster.start import Start

SHAPE = ("workers", "threads")
EARLY = 3  # code cells, the parameters among them: those before a later one may take long


def first_cluster(notebook: Path, values: Values) -> Start | None:
    """How the ranks of a notebook's first cluster start; None: that cannot be read.

    It is read where one of the first cells calls `Cluster` in a line of its own with `workers` and
    `threads` alone, each a number or a parameter: `cluster = lk.Cluster(workers=workers)`.

    Args:
        notebook: an .ipynb file.
        values: of its parameters, checked.
    """
    from labkit.cluster.start import Start

    known = {name: each.default for name, each in declared(notebook).items()} | {**values}
    code = [cell for cell in cells.read(notebook) if cell.kind == "code"]
    try:
        for cell in code[:EARLY]:
            found = ast.parse(cell.source)
            if "parameters" not in cell.tags:
                for name in _stored(found):
                    known.pop(name, None)
            if "Cluster(" in cell.source:
                shape = _shape(found, known)
                return None if shape is None else Start.asked(*shape)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, InvalidInput):
        return None  # a magic, or what only its kernel can say
    return None


def _stored(cell: ast.Module) -> list[str]:
    """Names to which a cell gives another value than its parameter had."""
    names = (node for node in ast.walk(cell) if isinstance(node, ast.Name))
    return [node.id for node in names if isinstance(node.ctx, ast.Store)]


def _shape(cell: ast.Module, known: Mapping[str, Any]) -> tuple[int, int] | None:
    for statement in cell.body:
        call = getattr(statement, "value", None)
        if isinstance(statement, ast.With):
            call = statement.items[0].context_expr
        if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] != "Cluster":
            continue
        if len(call.args) > len(SHAPE):
            return None
        given = dict(zip(SHAPE, call.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        shape = {name: _value(node, known) for name, node in given.items()}
        readable = given.keys() <= {*SHAPE} and all(type(n) is int for n in shape.values())
        return (
            (shape["workers"], shape.get("threads", 1)) if readable and "workers" in shape else None
        )
    return None


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    return ast.literal_eval(node)
