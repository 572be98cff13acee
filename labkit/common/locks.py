"""Locks and semaphores between the processes of a machine.

A counting semaphore between processes; a slot is freed when the process that holds it exits.

    python -m labkit.common.locks MODULE [arguments]

This command waits for a free slot, and then runs the module in the same process. Before a slot is
free, the command imports almost nothing, because many ranks wait at the same time. If the cluster's
keeper process ends while the command waits, the command exits.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from labkit.common.files import usable_cores

# The environment variable LABKIT_KEEPER contains the path of the lock file of a cluster's keeper
# process.
KEEPER = "LABKIT_KEEPER"
POLL_INTERVAL = 0.05  # seconds


class Lock:
    """A lock on a file; this process owns it until `release`, or until the process exits."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def acquire(self, wait: bool = False) -> bool:
        """Acquire the lock and return True; if it is taken and `wait` is False, return False."""
        while True:
            try:
                # With the flag LOCK_NB, `fcntl.lockf` never blocks, so `acquire` polls the lock.
                # The kernel assigns file locks to processes, not to threads. Threads of two
                # processes may wait for each other's locks. With blocking calls, the kernel would
                # report a deadlock of the two processes.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process owns the lock
                if not wait:
                    return False
                time.sleep(POLL_INTERVAL)
            else:
                return True

    def release(self) -> None:
        """Release the lock and close its file."""
        os.close(self._file)

    def is_held(self) -> bool:
        """Return whether another process owns the lock; the caller must not own the lock."""
        if not self.acquire():
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return False


# The subfolder `starts` of a cluster's folder contains lock files. Each lock file is a slot that a
# rank needs in order to start.
FOLDER = "starts"
# By default, a semaphore has at least four slots (LEAST), even on a machine with one core.
LEAST = 4


class Semaphore:
    """A semaphore with `count` slots: at most `count` processes can acquire a slot at a time.

    Args:
        folder: Folder with one lock file for each slot.
        count: Number of slots; None: two per core, but at least `LEAST`.
    """

    def __init__(self, folder: Path, count: int | None = None) -> None:
        self.folder, self.count = folder, count or max(LEAST, 2 * usable_cores())
        self._slot: Lock | None = None

    def acquire(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a free slot and return True; return False once `is_wanted` returns False."""
        while is_wanted():
            for number in range(self.count):
                slot = Lock(self.folder / str(number))
                if slot.acquire():
                    self._slot = slot
                    return True
                slot.release()
            time.sleep(POLL_INTERVAL)
        return False

    def release(self) -> None:
        """Release the slot, if this object has acquired one."""
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


# `_starts` contains the semaphores that this process holds until its module has started.
_starts: list[Semaphore] = []


def start_semaphore(keeper: Path) -> Semaphore:
    """Return the semaphore that limits how many ranks of a cluster start at the same time."""
    return Semaphore(keeper.parent / FOLDER)


def release_start_slot() -> None:
    """Release the slot that this process has acquired in order to start."""
    while _starts:
        _starts.pop().release()


def main() -> None:
    """Wait for a free slot, then run the module that the command line names."""
    del sys.argv[0]
    keeper = Path(os.environ[KEEPER])
    places = start_semaphore(keeper)
    if places.acquire(Lock(keeper).is_held):
        _starts.append(places)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Other modules read `_starts` from the module `labkit.common.locks`, but this process runs
    # the module under the name `__main__`. The process imports and uses the module
    # `labkit.common.locks` under its usual name. A second copy of the module would have a second
    # list `_starts`.
    from labkit.common import locks

    locks.main()
