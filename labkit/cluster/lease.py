"""Leases of clusters: a cluster lives as long as a process holds a lease on it.

A lease is a lock on a file. The operating system releases the lock when its holder exits, even by a
crash, and keeps it while the holder is busy, stopped or asleep. Leases are therefore more reliable
than timeouts and heartbeats.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from labkit.common.lock import KEEPER as KEEPER
from labkit.common.lock import POLL_INTERVAL as POLL_INTERVAL
from labkit.common.lock import Lock as Lock
from labkit.common.paths import runtime_folder

HOLD = "LABKIT_HOLD"  # environment variable with the path of a sweep's Hold
WARM = "warm"  # replaces the pid in the name of the lease that keeps warm engines


class Lease(Lock):
    """This process's claim on a cluster.

    Args:
        folder: Folder of the cluster.
        who: Name of the holder for the lease file's name; default: the id of this process.
    """

    def __init__(self, folder: Path, who: str = "") -> None:
        name = f"{who or os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(folder / f"lease-{name}")
        self.acquire()
        # The file moves to the leases after its lock is held, because the keeper removes unlocked
        # lease files.
        (folder / "leases").mkdir(exist_ok=True)
        self.path = self.path.rename(folder / "leases" / name)

    def release(self) -> None:
        """Release the lease; the cluster ends when no lease is left."""
        self.path.unlink(missing_ok=True)
        super().release()


class Hold(Lock):
    """A sweep's claim on all clusters that its notebook runs start with `HOLD=<its path>`.

    Each cluster's folder gets a hard link to the Hold's file. All links share one lock, because a
    lock belongs to the file.
    """

    def __init__(self) -> None:
        super().__init__(runtime_folder("holds") / secrets.token_hex(4))
        self.acquire()


def link_hold(folder: Path) -> None:
    """Link the Hold of this process's environment, if any, to the leases of this cluster."""
    if path := os.environ.get(HOLD):
        # The link may exist already. If the sweep has ended, this process will end soon, too.
        with suppress(FileExistsError, FileNotFoundError):
            os.link(path, folder / "leases" / Path(path).name)


def is_wanted(folder: Path) -> bool:
    """Return whether another process holds a lease on this folder's cluster."""
    for path in (folder / "leases").glob("*"):
        if is_held(path):
            return True
        # The lock is free, so the holder has exited without releasing its lease.
        path.unlink(missing_ok=True)
    return False


def release_warm_lease(folder: Path) -> None:
    """End the lease of the process that keeps a cluster warm, so that the caller owns the cluster.

    The caller must hold the start lock, so that only one process claims the cluster.
    """
    for path in (folder / "leases").glob(f"{WARM}-*"):
        path.unlink(missing_ok=True)


class Turn:
    """The exclusive use of a cluster's ranks by one call; the constructor waits for its turn.

    A file lock cannot separate threads of one process, and a thread that closes the file would
    release another thread's lock. Threads of this process therefore wait for a thread lock first.
    """

    _thread_locks: ClassVar[dict[Path, threading.Lock]] = {}

    def __init__(self, folder: Path) -> None:
        # The thread lock belongs to the folder, because several Cluster objects may use one
        # cluster.
        self._thread_lock = self._thread_locks.setdefault(folder, threading.Lock())
        if not self._thread_lock.acquire(blocking=False):
            print(
                "waiting until the ranks have completed another call", file=sys.stderr, flush=True
            )
            self._thread_lock.acquire()
        self._lock = Lock(folder / "run.lock")
        try:
            # The second lock makes the queue fair, because a process that has used the ranks must
            # queue again.
            with locked(folder / "next.lock"):
                self._lock.acquire(wait=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the next call use the ranks."""
        self._lock.release()
        self._thread_lock.release()


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold the lock on a file inside a block; print `waiting` if another process holds it."""
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
    """Return whether another process holds the lock on this file."""
    lock = Lock(path)
    try:
        return lock.is_held()
    finally:
        lock.release()


def wait_until_free(path: Path, seconds: float) -> bool:
    """Wait until a file's lock is free, at most `seconds`; return whether it is free."""
    lock, end = Lock(path), time.monotonic() + seconds
    try:
        while lock.is_held():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_INTERVAL)
        return True
    finally:
        lock.release()
