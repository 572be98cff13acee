"""A file lock between processes, which the operating system releases when its holder exits."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

KEEPER = "LABKIT_KEEPER"  # environment variable with the lock file of a cluster's keeper
POLL_INTERVAL = 0.05  # seconds


class Lock:
    """A lock on a file, held by this process until `release` or until the process exits."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def acquire(self, wait: bool = False) -> bool:
        """Acquire the lock and return True; without `wait`, return False if the lock is taken."""
        while True:
            try:
                # The call does not block. The kernel tracks locks by process, so it would report a
                # deadlock between two processes whose threads wait for each other's locks.
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process holds the lock
                if not wait:
                    return False
                time.sleep(POLL_INTERVAL)
            else:
                return True

    def release(self) -> None:
        """Release the lock and close its file."""
        os.close(self._file)

    def is_held(self) -> bool:
        """Return whether another process holds the lock, which this process must not hold."""
        if not self.acquire():
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return False
