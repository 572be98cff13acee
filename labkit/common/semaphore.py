"""A counting semaphore between processes; a holder that dies, however, releases its place.

    python -m labkit.common.semaphore MODULE [arguments]

This command waits for a place to start in, then runs the module in the same process. It imports
almost nothing before, since many ranks wait at a time. It ends when the keeper's lock is free.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path

from labkit.common.lock import KEEPER, LOOK_EVERY, Lock
from labkit.common.paths import usable_cores

FOLDER = "starts"  # in a cluster's folder
LEAST = 4  # places: so few ranks start at once on any machine


class Semaphore:
    """At most `count` processes hold a semaphore at a time.

    Args:
        folder: holds a lock for each place.
        count: of places; default: two for each core, at least `LEAST`.
    """

    def __init__(self, folder: Path, count: int | None = None) -> None:
        self.folder, self.count = folder, count or max(LEAST, 2 * usable_cores())
        self._place: Lock | None = None

    def acquire(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a place; return False as soon as the place is not wanted any more."""
        while is_wanted():
            for number in range(self.count):
                place = Lock(self.folder / str(number))
                if place.acquire():
                    self._place = place
                    return True
                place.release()
            time.sleep(LOOK_EVERY)
        return False

    def release(self) -> None:
        """Give the place back, if this object holds one."""
        if self._place is not None:
            self._place.release()
            self._place = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


_starts: list[Semaphore] = []  # held by this process until its module is at work


def start_places(keeper: Path) -> Semaphore:
    """Return the semaphore of all ranks that one keeper starts."""
    return Semaphore(keeper.parent / FOLDER)


def end_start() -> None:
    """Release the place in which this process has started."""
    while _starts:
        _starts.pop().release()


def main() -> None:
    """Run the module of the command line when there is a place for it."""
    del sys.argv[0]
    keeper = Path(os.environ[KEEPER])
    places = start_places(keeper)
    if places.acquire(Lock(keeper).is_held):
        _starts.append(places)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Others find `_starts` in the module of this name: this one is called `__main__`.
    from labkit.common import semaphore

    semaphore.main()
