"""Functions that time the transfer of an array over any transport."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.frameworks.tcp_counters import connections, open_socket

WARM, LEAST, MOST = 3, 3, 200  # number of round trips: warm-up, minimum, maximum
BUDGET = 0.3  # seconds of round trips per transport and array size


class ExchangeCost(TypedDict):
    """The cost of sending one array in one direction.

    Attributes:
        seconds: Half of the median round-trip time.
        processor: CPU seconds of both processes together, including busy waiting.
        tcp: Bytes that this process sends by TCP.
        right: Whether the returned array is bit-identical to the sent array.
    """

    seconds: float
    processor: float
    tcp: float
    right: bool


def array(nbytes: int, seed: int = 0) -> np.ndarray:
    """Return an array of random bytes, which no transport can compress."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def exchanges(seconds: float) -> int:
    """Return how many round trips of `seconds` each fit into the time budget."""
    return int(np.clip(BUDGET / seconds, LEAST, MOST))


def timed(calls: int, call: Callable[[], object]) -> list[float]:
    """Call a function `calls` times, and return the seconds of each call."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def sent_by_tcp() -> int:
    """Return how many sent bytes are acknowledged on this process's open TCP connections."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the file descriptor was closed in the meantime
            target = str(Path(f"/proc/self/fd/{name}").readlink())
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    return sum(end.sent for end in connections(open_socket()) if end.inode in inodes)
