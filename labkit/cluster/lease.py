"""Leases: a cluster lives as long as a process holds one, and a lease dies with its process.

A lease is a lock on a file. The operating system takes the lock away when its holder ends,
however it ends, and keeps it while the holder is busy, stopped or asleep, so no clock and no
heartbeat can be wrong about it.
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
from labkit.common.lock import LOOK_EVERY as LOOK_EVERY
from labkit.common.lock import Lock as Lock
from labkit.common.paths import runtime_folder

HOLD = "LABKIT_HOLD"  # names the file of a Hold
WARM = "warm"  # in place of a process: whose lease the first who comes ends


class Lease(Lock):
    """This process's claim on a cluster.

    Args:
        folder: of the cluster.
        who: claims it; default: the number of this process.
    """

    def __init__(self, folder: Path, who: str = "") -> None:
        name = f"{who or os.getpid()}-{secrets.token_hex(4)}"
        super().__init__(folder / f"lease-{name}")
        self.acquire()
        # It appears among the leases when it is held: the keeper takes away those that are not.
        (folder / "leases").mkdir(exist_ok=True)
        self.path = self.path.rename(folder / "leases" / name)

    def release(self) -> None:
        """End the claim; the cluster ends with the last one."""
        self.path.unlink(missing_ok=True)
        super().release()


class Hold(Lock):
    """A claim on each cluster that is started under `HOLD=<its path>`: a sweep keeps them warm.

    The clusters' own folders get further names of this file, and a lock is on the file.
    """

    def __init__(self) -> None:
        super().__init__(runtime_folder("holds") / secrets.token_hex(4))
        self.acquire()


def hold(folder: Path) -> None:
    """Let the Hold of this process's environment, if there is one, claim this cluster, too."""
    if path := os.environ.get(HOLD):
        # There already: another process has done it. Gone: its sweep has ended, as this one will.
        with suppress(FileExistsError, FileNotFoundError):
            os.link(path, folder / "leases" / Path(path).name)


def is_wanted(folder: Path) -> bool:
    """Whether another process holds a lease on the cluster of this folder."""
    for path in (folder / "leases").glob("*"):
        if is_held(path):
            return True
        # Nobody holds it: its process has ended without saying so.
        path.unlink(missing_ok=True)
    return False


def take(folder: Path) -> None:
    """End the claim of who keeps this cluster warm, if one does: it is the caller's from now on.

    By its name, under the start lock: it is taken once, and ends with who has taken it.
    """
    for path in (folder / "leases").glob(f"{WARM}-*"):
        path.unlink(missing_ok=True)


class Turn:
    """The use of a cluster's ranks, which one call has at a time; made when it is this one's.

    A lock on a file knows processes alone, and is lost when its process closes the file a second
    time: the threads and calls of this one take turns before that.
    """

    _here: ClassVar[dict[Path, threading.Lock]] = {}

    def __init__(self, folder: Path) -> None:
        # One lock a folder: several Cluster objects of a process may be of the same cluster.
        self._own = self._here.setdefault(folder, threading.Lock())
        if not self._own.acquire(blocking=False):
            print("waiting for the ranks, which work for another call", file=sys.stderr, flush=True)
            self._own.acquire()
        self._lock = Lock(folder / "run.lock")
        try:
            # Who waits stands at the door: who has the ranks and asks again comes behind.
            with locked(folder / "next.lock"):
                self._lock.acquire(wait=True)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the next one have it."""
        self._lock.release()
        self._own.release()


@contextmanager
def locked(path: Path, waiting: str = "") -> Iterator[None]:
    """Hold a lock for the length of a block, waiting for it; say so where that may take long."""
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
    """Whether another process holds the lock on this file."""
    lock = Lock(path)
    try:
        return lock.is_held()
    finally:
        lock.release()


def wait_until_free(path: Path, seconds: float) -> bool:
    """Wait until nobody holds the lock; False when that takes longer."""
    lock, end = Lock(path), time.monotonic() + seconds
    try:
        while lock.is_held():
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_EVERY)
        return True
    finally:
        lock.release()
