"""A lock between processes, which the operating system releases when its holder ends."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

KEEPER = "LABKIT_KEEPER"  # names the lock of a cluster's keeper to all that the keeper starts
LOOK_EVERY = 0.05  # seconds


class Lock:
    """A lock on a file, held by this process until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def acquire(self, wait: bool = False) -> bool:
        """Take the lock; without `wait`, say at once whether that worked."""
        while True:
            try:
                # Never a call that waits: the system counts by process, and takes two processes
                # whose threads wait for each other's locks for a deadlock.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another one has it
                if not wait:
                    return False
                time.sleep(LOOK_EVERY)
            else:
                return True

    def release(self) -> None:
        """Give the lock back."""
        os.close(self._file)

    def is_held(self) -> bool:
        """Whether another process holds it; this one must not."""
        if not self.acquire():
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return False
