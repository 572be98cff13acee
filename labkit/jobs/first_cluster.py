"""Prediction of how a notebook's first cluster starts, from the source of the notebook."""

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
EARLY = 3  # The search reads at most `EARLY` code cells, including the cell with the parameters.


def first_cluster(notebook: Path, values: Values) -> Start | None:
    """Return how the ranks of a notebook's first cluster start; None if the source does not tell.

    For a prediction, one of the first cells must call `Cluster` in a separate statement. The call
    of `Cluster` may have only the arguments `workers` and `threads`. Each argument of `Cluster`
    must be a number or the name of a parameter. For example, a cell may contain `cluster =
    lk.Cluster(workers=workers)`.

    Args:
        notebook: Notebook file (.ipynb).
        values: Validated values of the notebook's parameters.
    """
    from labkit.cluster.start import Start

    parameter_values = {
        name: parameter.default for name, parameter in declared(notebook).items()
    } | {**values}
    code = [cell for cell in cells.read(notebook) if cell.kind == "code"]
    try:
        for cell in code[:EARLY]:
            tree = ast.parse(cell.source)
            if "parameters" not in cell.tags:
                for name in _assigned_names(tree):
                    parameter_values.pop(name, None)
            if "Cluster(" in cell.source:
                shape = _shape(tree, parameter_values)
                return None if shape is None else Start.from_options(*shape)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError, InvalidInput):
        # The error means that the cell contains a magic, or a value that only the kernel can
        # compute.
        return None
    return None


def _assigned_names(cell: ast.Module) -> list[str]:
    """Return the names to which a cell assigns values; an assignment may change a parameter."""
    names = (node for node in ast.walk(cell) if isinstance(node, ast.Name))
    return [node.id for node in names if isinstance(node.ctx, ast.Store)]


def _shape(cell: ast.Module, parameter_values: Mapping[str, Any]) -> tuple[int, int] | None:
    for statement in cell.body:
        call = getattr(statement, "value", None)
        if isinstance(statement, ast.With):
            call = statement.items[0].context_expr
        if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] != "Cluster":
            continue
        if len(call.args) > len(SHAPE):
            return None
        arguments = dict(zip(SHAPE, call.args, strict=False))
        arguments |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        shape = {name: _value(node, parameter_values) for name, node in arguments.items()}
        readable = arguments.keys() <= {*SHAPE} and all(type(n) is int for n in shape.values())
        return (
            (shape["workers"], shape.get("threads", 1)) if readable and "workers" in shape else None
        )
    return None


def _value(node: ast.expr, parameter_values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return parameter_values.get(node.id, UNKNOWN)
    return ast.literal_eval(node)
