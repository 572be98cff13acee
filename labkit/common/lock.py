"""A file lock between processes, which the operating system releases when its owner exits."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

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
        """Acquire the lock and return True; without `wait`, return False if it is taken."""
        while True:
            try:
                # With LOCK_NB, `fcntl.lockf` never blocks; the method `acquire` polls the lock. The
                # kernel assigns locks to processes, not to threads. The kernel would report a
                # deadlock if the threads of two blocked processes waited for each other's locks.
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
        """Return whether another process owns the lock; this process must not own it."""
        if not self.acquire():
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        return False
