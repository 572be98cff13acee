"""The cell magic %%fault, which injects a fault into all experiments of a notebook cell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.network import Fault

_faults: list[Fault] = []


def with_injected_faults(experiment: Experiment) -> Experiment:
    """Return the experiment with the faults that the current cell injects."""
    if not _faults:
        return experiment
    return experiment.replace(faults=(*experiment.faults, *_faults))


@contextmanager
def fault_injected(fault: Fault) -> Iterator[None]:
    """Inject the fault into each experiment that runs inside the context."""
    _faults.append(fault)
    try:
        yield
    finally:
        _faults.remove(fault)


def parse_fault(line: str) -> Fault:
    """Return the fault that a line such as `rank=2 step=10 kind=kill` describes."""
    words = [word.partition("=") for word in line.split()]
    if not words or not all(value for _, _, value in words):
        raise InvalidInput(
            f"%%fault {line.strip()}: give options as name=value, as in %%fault rank=2 step=10 "
            "kind=kill"
        )
    return Fault(**{name: value for name, _, value in words})


def register() -> None:
    """Register the magic `%%fault` in this IPython."""
    from IPython import get_ipython

    shell = get_ipython()

    def fault(line: str, cell: str) -> Any:
        """Run the cell, and inject the fault that the line describes into its experiments."""
        with fault_injected(parse_fault(line)):
            return _run(cell, shell)

    shell.register_magic_function(fault, "cell", "fault")


def _run(cell: str, shell: Any) -> Any:
    """Run a cell whose errors propagate, and return the value of the cell's last expression."""
    statements = ast.parse(shell.transform_cell(cell)).body
    end = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    module = ast.Module(statements, type_ignores=[])
    exec(compile(module, "<%%fault>", "exec"), shell.user_ns)
    if isinstance(end, ast.Expr):
        return eval(compile(ast.Expression(end.value), "<%%fault>", "eval"), shell.user_ns)
    return None
