"""Detection of dead and suspended processes of a cluster, and a function that ends all of them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.cluster.lease import KEEPER
from labkit.records.endings import End, describe_exit

EXITED = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
# The variable PRTE_MCA_prte_local_tmpdir_base sets the parent folder of mpiexec's session folders.
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"
SEGMENT = "/sm_segment."  # part of the file names of Open MPI's shared-memory files
STOPPED = 30.0  # seconds that a process may be suspended by a signal before the cluster ends


class ProcessWatch:
    """Detects processes that have ended or are suspended, including processes of other parents.

    Args:
        named: Process ids by name of the process.
    """

    def __init__(self, named: Mapping[str, int]) -> None:
        self._watched = {name: psutil.Process(pid) for name, pid in named.items()}
        parts = self._watched["the controller"].children()
        self._parts = {f"child process {n} of the controller": part for n, part in enumerate(parts)}
        # Number of seconds for which each process has been suspended.
        self._still: dict[str, float] = {}

    def end(self, seconds: float) -> End | None:
        """Report that a child of the controller has ended, or a process is suspended too long.

        The launchers and the method `dead` report the ends of all other processes. Return None if
        no child has ended and no process is suspended too long.

        Args:
            seconds: Seconds since the last call of this method.
        """
        for name, process in (self._watched | self._parts).items():
            is_still = _status(process) == psutil.STATUS_STOPPED
            # The seconds of all calls are added up, because a clock would also count the time in
            # which this process itself is suspended.
            self._still[name] = self._still.get(name, 0) + seconds if is_still else 0
            if self._still[name] > STOPPED:
                return describe_exit(name, -signal.SIGSTOP)
        ended = [name for name, part in self._parts.items() if has_exited(part)]
        return End(f"{ended[0]} has ended") if ended else None

    def dead(self) -> list[int]:
        """Return the ranks whose processes have ended."""
        named = ((name.split(), process) for name, process in self._watched.items())
        return [int(w[1]) for w, process in named if w[0] == "rank" and has_exited(process)]


def has_exited(process: psutil.Process) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it."""
    return _status(process) in EXITED


def end_all(lock: Path) -> None:
    """End all processes started by this keeper process or by an earlier one with the same lock.

    Open MPI's files are also removed, because mpiexec does not remove its files when SIGKILL ends
    it.
    """
    files: set[Path] = set()
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        end, signaled = time.monotonic() + seconds, set[psutil.Process]()
        # The search for processes is repeated, because a process that is just starting may appear
        # later.
        while (processes := _started(lock)) and time.monotonic() < end:
            for process in processes:
                files |= _files(process)
                # Each process receives only one SIGTERM, because a second SIGTERM makes mpiexec
                # skip its cleanup.
                if process not in signaled:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
            signaled.update(processes)
            psutil.wait_procs(processes, timeout=0.5)
    for path in files:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _files(process: psutil.Process) -> set[Path]:
    """Return mpiexec's session folder, and the shared-memory files that a process maps."""
    base = os.environ.get(SESSIONS) or tempfile.gettempdir()
    paths = {Path(base) / f"ompi.{process.pid}"}
    maps = Path(f"/proc/{process.pid}/maps")  # /proc/PID/maps exists only on Linux
    with suppress(OSError):  # the process may have ended
        lines = maps.read_text().splitlines()
        paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if SEGMENT in line}
    return paths


def _started(lock: Path) -> list[psutil.Process]:
    processes = set(psutil.Process().children(recursive=True))
    # The variable KEEPER in a process's environment also identifies orphans, which are no longer
    # descendants of the keeper process.
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or another user owns it
            if process.environ().get(KEEPER) == str(lock):
                processes.add(process)
    return [process for process in processes if process.pid != os.getpid()]


def _status(process: psutil.Process) -> str | None:
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return None
