"""Test that labkit finds the MPI library of mpi4py, names it, and finds its mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.communicator import launcher, mpi_library
from labkit.communicator.mpi_library import Library

TEXTS = {
    "Open MPI v5.0.11, package: Open MPI root@host Distribution, ident: 5.0.11": "Open MPI v5.0.11",
    "mpiexec (Open MPI) 5.0.11\n\nReport bugs to": "Open MPI v5.0.11",
    "mpiexec.openmpi (OpenRTE) 4.1.4": "Open MPI v4.1.4",
    "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25": "MPICH v5.0.2",
    "HYDRA build details:\n    Version:        4.0.2\n    Release Date:": "MPICH v4.0.2",
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2024": "Intel MPI v2021.13",
    "mpiexec version 1.2 of a vendor, built today": "mpiexec version 1.2 of a vendor",
}


def test_a_library_and_its_mpiexec_have_one_name() -> None:
    assert {text: mpi_library.implementation(text) for text in TEXTS} == TEXTS


@pytest.mark.parametrize(
    ("name", "library", "commands", "belongs"),
    [
        ("Open MPI v5.0", "env/lib/libmpi.so.40", ["env/bin/mpiexec", "bin/mpiexec"], 0),
        # Debian has one folder of commands for two libraries.
        ("Open MPI v4.1", "lib/arch/libmpi.so.40", ["bin/mpiexec", "bin/mpiexec.openmpi"], 1),
        ("MPICH v4.0", "lib/arch/libmpich.so.12", ["bin/mpiexec.mpich", "bin/mpiexec"], 0),
        # Red Hat has a folder for each library.
        ("MPICH v4.1", "lib64/mpich/lib/libmpi.so.12", ["lib64/mpich/bin/mpiexec"], 0),
        ("Intel MPI v2021.13", "impi/lib/release/libmpi.so.12", ["impi/bin/mpiexec"], 0),
        ("Open MPI v5.0", "elsewhere/libmpi.so.40", ["bin/mpiexec"], None),
    ],
)
def test_the_mpiexec_that_is_installed_beside_a_library(
    tmp_path: Path, name: str, library: str, commands: list[str], belongs: int | None
) -> None:
    for command in commands:
        (tmp_path / command).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / command).touch()
    expected = None if belongs is None else tmp_path / commands[belongs]
    assert Library(name, str(tmp_path / library)).mpiexec == expected


@pytest.mark.heavy  # a process
def test_the_library_is_the_one_that_mpi4py_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = mpi_library.find()
    assert usual is not None
    monkeypatch.setenv("MPI4PY_LIBMPI", usual.path)  # the same library, but a process finds it
    loaded = mpi_library.find()
    assert loaded is not None
    assert loaded.path == usual.path
    assert loaded.name.startswith("Open MPI v")
    assert loaded.mpiexec == usual.mpiexec == Path(launcher.mpiexec()[0])
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nowhere/libmpi.so")
    assert mpi_library.find() is None


SCRIPT = "import labkit.keras as lkk; print('trains alone as', lkk.init().rank)"


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="MPICH is not installed")
@pytest.mark.slow
def test_mpich_with_another_library_trains_nothing() -> None:
    done = subprocess.run(
        ["mpiexec.hydra", "-n", "2", sys.executable, "-c", SCRIPT],
        env=os.environ | launcher.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    assert done.stdout == ""
    assert "an mpiexec of MPICH or Intel MPI has started 2 ranks (PMI_SIZE=2)" in done.stderr
    assert f"start the ranks by {launcher.mpiexec()[0]}" in done.stderr
