"""How the exchange of one array is timed, whatever carries it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.frameworks.tcp_counters import book, connections

WARM, LEAST, MOST = 3, 3, 200  # exchanges
BUDGET = 0.3  # s, for which one case goes on


class Found(TypedDict):
    """What one case has shown.

    Attributes:
        seconds: the median of half an exchange there and back.
        processor: seconds of both processes, busy waiting included, of one array one way.
        tcp: bytes that left this process by TCP, for one array one way.
        right: whether what came back is what was sent, bit by bit.
    """

    seconds: float
    processor: float
    tcp: float
    right: bool


def array(nbytes: int, seed: int = 0) -> np.ndarray:
    """Random bytes: nothing on the way can make them fewer."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8).copy()


def exchanges(seconds: float) -> int:
    """How many fit the budget, of so many seconds each."""
    return int(np.clip(BUDGET / seconds, LEAST, MOST))


def timed(calls: int, call: Callable[[], object]) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def sent_by_tcp() -> int:
    """Bytes that others have received by TCP from this process, over connections still open."""
    own = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            target = str(Path(f"/proc/self/fd/{name}").readlink())
            if target.startswith("socket:["):
                own.add(int(target[8:-1]))
    return sum(end.sent for end in connections(book()) if end.inode in own)
