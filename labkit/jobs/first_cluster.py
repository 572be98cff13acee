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


def first_cluster(notebook: Path, values: Values) -> Start | None:
    """How the ranks of a notebook's first cluster start; None: that cannot be read.

    It is read where a cell's own line calls `Cluster` with `workers` and `threads` alone, each a
    number or a parameter: `cluster = lk.Cluster(workers=workers)`.

    Args:
        notebook: an .ipynb file.
        values: of its parameters, checked.
    """
    from labkit.cluster.start import Start

    known = {name: each.default for name, each in declared(notebook).items()} | {**values}
    for cell in cells.read(notebook):
        if cell.kind != "code" or "Cluster(" not in cell.source:
            continue
        try:
            shape = _shape(ast.parse(cell.source), known)
            if shape is None:
                return None
            return Start.asked(shape["workers"], shape.get("threads", 1))
        except (SyntaxError, ValueError, InvalidInput):  # a magic, or what only its kernel can say
            return None
    return None


def _shape(cell: ast.Module, known: Mapping[str, Any]) -> dict[str, int] | None:
    for statement in cell.body:
        call = getattr(statement, "value", None)
        if isinstance(statement, ast.With):
            call = statement.items[0].context_expr
        if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] != "Cluster":
            continue
        given = dict(zip(SHAPE, call.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        shape = {name: _value(node, known) for name, node in given.items()}
        readable = given.keys() <= {*SHAPE} and all(type(n) is int for n in shape.values())
        return shape if readable and "workers" in shape else None
    return None


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    return ast.literal_eval(node)
