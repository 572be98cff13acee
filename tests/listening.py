"""Find processes started by this one that listen where other machines can reach them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import psutil

from labkit.cluster.processes import exposed_listeners

OWN_DEVICES = {"lo", "veth0"}  # devices in labkit's network namespaces
LOOK_EVERY = 0.2  # seconds


def is_enclosed(process: psutil.Process) -> bool:
    """Return whether a process is in a labkit network namespace, which no other machine reaches."""
    if os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        return False
    lines = Path(f"/proc/{process.pid}/net/dev").read_text().splitlines()[2:]
    return {line.partition(":")[0].strip() for line in lines} <= OWN_DEVICES


def open_to_others() -> Iterator[str]:
    """Yield the address and the command line of each exposed socket."""
    # Skip this process itself: another test may have started a TensorFlow server here, which never
    # ends.
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):  # the process has ended
            if not is_enclosed(process):
                for each in exposed_listeners(process):
                    yield f"{each.address}: {' '.join(process.cmdline())}"


@contextmanager
def watched() -> Iterator[set[str]]:
    """Look for exposed sockets repeatedly, and yield the set of all that were found."""
    found: set[str] = set()
    ends = Event()

    def look() -> None:
        while not ends.wait(LOOK_EVERY):
            found.update(open_to_others())

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ends.set()
        thread.join()
