"""Test `%%fault`: it injects a fault into each experiment of its cell, and into no later one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit import Experiment, Fault
from labkit.cluster import magic
from labkit.common.errors import InvalidInput

CELLS = """
from IPython.core.interactiveshell import InteractiveShell
from labkit import Experiment
from labkit.cluster import magic
shell = InteractiveShell.instance()
magic.register_fault_magic()
shell.user_ns |= {"Experiment": Experiment, "planted": magic.with_injected_faults}
cell = "x = planted(Experiment(workers=3))\\nx.faults[0].kind, x.faults[0].seconds"
told = shell.run_cell("%%fault rank=2 step=1 kind=pause seconds=0.5\\n" + cell)
assert told.result == ("pause", 0.5), told
assert not shell.run_cell("planted(Experiment(workers=3)).faults").result
failed = shell.run_cell("%%fault rank=0 step=1 kind=kill\\n1 / 0")
assert type(failed.error_in_exec) is ZeroDivisionError
assert not shell.run_cell("planted(Experiment(workers=3)).faults").result
print("done")
"""


def test_a_cell_plants_its_fault_and_no_other_cell_has_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.endswith("done\n"), done.stderr


def test_an_experiment_keeps_the_faults_that_it_has() -> None:
    own = Fault("nan", rank=0, step=1)
    with magic.fault_injected(magic.parse_fault("kind=kill rank=1 step=3")):
        found = magic.with_injected_faults(Experiment(workers=2, faults=own))
    assert [fault.kind for fault in found.faults] == ["nan", "kill"]
    assert magic.with_injected_faults(found) is found


@pytest.mark.parametrize("line", ["", "kill", "rank=1 step=", "rank=x step=1 kind=kill"])
def test_a_line_that_says_no_fault_is_refused(line: str) -> None:
    with pytest.raises(InvalidInput):
        magic.parse_fault(line)
