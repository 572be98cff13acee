"""The processes of a cluster: whether each is there and goes on, and how all of them end."""

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
from labkit.records.endings import End, described

GONE = (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
SESSIONS = "PRTE_MCA_prte_local_tmpdir_base"  # of mpiexec: where its session folders are
SEGMENT = "/sm_segment."  # in the name of Open MPI's shared memory
STOPPED = 30.0  # seconds after which a process that is stopped has ended the cluster


class Watch:
    """An eye on processes that are no children of this one, and on those that stand still.

    Args:
        named: the processes, by what they are called.
    """

    def __init__(self, named: Mapping[str, int]) -> None:
        self._watched = {name: psutil.Process(pid) for name, pid in named.items()}
        parts = self._watched["the controller"].children()
        self._parts = {f"part {n} of the controller": part for n, part in enumerate(parts)}
        self._still: dict[str, float] = {}  # seconds for which they have been stopped

    def end(self, seconds: float) -> End | None:
        """The part that has ended, or is stopped for too long; to be asked every so many seconds.

        The end of children, and of ranks, is told by those that collect them.
        """
        for name, process in (self._watched | self._parts).items():
            is_still = _status(process) == psutil.STATUS_STOPPED
            # Counted in looks, not by a clock: while this process is stopped, too, nobody is late.
            self._still[name] = self._still.get(name, 0) + seconds if is_still else 0
            if self._still[name] > STOPPED:
                return described(name, -signal.SIGSTOP)
        gone = [name for name, part in self._parts.items() if is_gone(part)]
        return End(f"{gone[0]} has ended") if gone else None

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        named = ((name.split(), process) for name, process in self._watched.items())
        return [int(w[1]) for w, each in named if w[0] == "rank" and is_gone(each)]


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, collected or not."""
    return _status(process) in GONE


def end_all(lock: Path) -> None:
    """End all that this process, or an earlier keeper of this lock, has started.

    What Open MPI keeps in files for these processes goes with them: mpiexec removes the files, but
    not where SIGKILL ends it.
    """
    files: set[Path] = set()
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 10.0)):
        end, signaled = time.monotonic() + seconds, set[psutil.Process]()
        # Again and again: what is just being started has not been there a moment ago.
        while (processes := _started(lock)) and time.monotonic() < end:
            for process in processes:
                files |= _files(process)
                # Once: a second SIGTERM makes mpiexec leave without tidying up.
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
    """Return the session folder of an mpiexec, and the segments that a rank shares with others."""
    base = os.environ.get(SESSIONS) or tempfile.gettempdir()
    paths = {Path(base) / f"ompi.{process.pid}"}
    maps = Path(f"/proc/{process.pid}/maps")  # of Linux
    with suppress(OSError):  # the process has ended
        lines = maps.read_text().splitlines()
        paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if SEGMENT in line}
    return paths


def _started(lock: Path) -> list[psutil.Process]:
    processes = set(psutil.Process().children(recursive=True))
    # By what they inherit, too: the children of one that is gone have another parent.
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it is gone, or another user's
            if process.environ().get(KEEPER) == str(lock):
                processes.add(process)
    return [each for each in processes if each.pid != os.getpid()]


def _status(process: psutil.Process) -> str | None:
    with suppress(psutil.NoSuchProcess):
        return str(process.status())
    return None
