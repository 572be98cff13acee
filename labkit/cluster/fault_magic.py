"""%%fault: a cell whose experiments all get a fault."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.network import Fault

_planted: list[Fault] = []


def with_planted(experiment: Experiment) -> Experiment:
    """An experiment with the faults of the cell that runs it."""
    if not _planted:
        return experiment
    return experiment.replace(faults=(*experiment.faults, *_planted))


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Meanwhile each experiment that is run here gets this fault."""
    _planted.append(fault)
    try:
        yield
    finally:
        _planted.remove(fault)


def said(line: str) -> Fault:
    """The fault that a line such as `rank=2 step=10 kind=kill` says."""
    words = [word.partition("=") for word in line.split()]
    if not words or not all(value for _, _, value in words):
        raise InvalidInput(
            f"%%fault {line.strip()}: give it as in %%fault rank=2 step=10 kind=kill"
        )
    return Fault(**{name: value for name, _, value in words})


def register() -> None:
    """Let `%%fault` in this IPython plant faults."""
    from IPython import get_ipython

    shell = get_ipython()

    def fault(line: str, cell: str) -> Any:
        """Run the cell; each experiment that it runs gets the fault that the line says."""
        with planted(said(line)):
            return _run(cell, shell)

    shell.register_magic_function(fault, "cell", "fault")


def _run(cell: str, shell: Any) -> Any:
    """Run a cell here, so that an error is its own; what its last expression is."""
    statements = ast.parse(shell.transform_cell(cell)).body
    end = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    module = ast.Module(statements, type_ignores=[])
    exec(compile(module, "<%%fault>", "exec"), shell.user_ns)
    if isinstance(end, ast.Expr):
        return eval(compile(ast.Expression(end.value), "<%%fault>", "eval"), shell.user_ns)
    return None
