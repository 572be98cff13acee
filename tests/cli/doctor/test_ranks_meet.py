"""Test that the doctor distinguishes ranks that do not connect, that hang, or that are bound."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from labkit.cli.doctor import diagnosis, ranks
from labkit.common.errors import LabkitError
from labkit.communicator import launcher

pytestmark = pytest.mark.heavy  # an mpiexec is started


def fake_mpiexec(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(launcher, "mpiexec", lambda ranks=None: [str(path)])


def test_ranks_that_do_not_find_each_other_are_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An mpiexec of another MPI library starts two processes, each of which is alone in its MPI
    # world.
    alone = f'"{sys.executable}" "$2" "$3" "$4"; "{sys.executable}" "$2" "$3" "$4"'
    fake_mpiexec(tmp_path, alone, monkeypatch)
    (found,) = ranks.ranks()
    assert found.broken
    assert "each rank has its own MPI_COMM_WORLD" in found.what
    assert "pip install --force-reinstall" in found.fix


def test_an_mpiexec_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, "echo There are not enough slots >&2; exit 1", monkeypatch)
    (found,) = ranks.ranks()
    assert found.broken
    assert "There are not enough slots" in found.what


def test_without_a_namespace_the_ranks_meet_all_the_same_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_mpiexec(tmp_path, "echo it was asked >&2; exit 1", monkeypatch)
    monkeypatch.setenv("PATH", "")  # without a command that creates network namespaces
    note, found = ranks.ranks()
    assert note.state == "note"
    assert "listens on every network interface for some seconds" in note.what
    assert "it was asked" in found.what


def test_an_mpiexec_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpiexec(tmp_path, "exec sleep 600", monkeypatch)
    monkeypatch.setattr(diagnosis, "LIMIT", 0.2)
    with pytest.raises(LabkitError, match="did not end within"):
        list(ranks.ranks())


def test_threads_that_are_not_those_of_the_experiment_are_broken() -> None:
    found = ranks.threads([{"threads": "1"}, {"threads": "8"}])
    assert found.broken
    assert found.fix == "unset TF_NUM_INTRAOP_THREADS"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are not bound here")
def test_a_rank_with_fewer_cores_than_the_machine_gives_is_bound() -> None:
    usable = len(os.sched_getaffinity(0))
    free, bound = {"cores": usable}, {"cores": usable - 1}
    assert ranks.binding([free, free], "again").state == "ok"
    found = ranks.binding([free, bound], "again")
    assert (found.state, found.fix) == ("note", "again")
    assert f"bound to {usable - 1} of {usable} cores" in found.what


def test_a_variable_that_binds_the_threads_of_every_rank_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    found = ranks.binding([{"cores": 10**6}], "again")
    assert (found.state, found.fix) == ("note", "unset OMP_PROC_BIND")


def test_an_mpiexec_of_another_library_is_told_with_the_one_that_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Path(sys.executable).with_name("mpiexec")
    monkeypatch.setenv("PATH", str(own.parent), prepend=os.pathsep)
    (one, two) = ranks.mpiexec()
    assert (one.state, two.state) == ("ok", "ok")
    assert f"mpiexec: {own} (Open MPI v" in one.what
    assert f"belongs to the MPI library {Path(sys.prefix) / 'lib' / 'libmpi.so'}" in one.what
    assert "set MPI4PY_LIBMPI=…/libmpi.so" in two.what
    fake_mpiexec(tmp_path, "echo 'mpiexec (OpenRTE) 4.1.4'", monkeypatch)
    (found,) = ranks.mpiexec()
    foreign = (
        f"mpiexec: {tmp_path / 'mpiexec'} (Open MPI v4.1.4) does not belong to the MPI library"
    )
    assert found.what.startswith(foreign)
    assert (found.broken, found.fix) == (True, f"export LABKIT_MPIEXEC={own}")


def test_a_foreign_mpiexec_that_is_first_on_path_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = launcher.mpiexec()
    fake_mpiexec(tmp_path, "echo 'HYDRA build details:'; echo 'Version: 4.0.2'", monkeypatch)
    monkeypatch.setattr(launcher, "mpiexec", lambda: own)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    note = list(ranks.mpiexec())[-1]
    assert note.state == "note"
    assert f"the first mpiexec on PATH, {tmp_path / 'mpiexec'} (MPICH v4.0.2)" in note.what
    assert note.fix == f"start your own scripts by {own[0]}"
