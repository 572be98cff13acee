"""How a peer's processes meet and time their steps: by labkit's rule, with nobody's own barrier.

Runs in the peer's Python, which may have neither labkit's dependencies nor MPI: NumPy only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

WARM, STEPS, TURN = 10, 50, 10  # as in labkit.bench.exchange
LIMIT = 120.0  # seconds to wait for another process

Step = Callable[[], Any]


class Meeting:
    """Processes of one host that meet over a file which they map into memory.

    Args:
        path: a file of zeros, `size_of(size)` bytes.
        rank, size: this process's number, and how many there are.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size, self._count = rank, size, 0
        # A cache line and a row of results for each process.
        whole = np.memmap(path, np.float64, "r+", shape=(size, 8 + STEPS))
        self._arrived, self._told = whole[:, 0], whole[:, 8:]

    @staticmethod
    def size_of(size: int) -> int:
        """Bytes of the file."""
        return size * (8 + STEPS) * 8

    def meet(self) -> None:
        """Come back when all processes have come. Raises: TimeoutError."""
        self._count += 1
        self._arrived[self.rank] = self._count
        start = time.monotonic()
        while self._arrived.min() < self._count:
            os.sched_yield()
            if time.monotonic() - start > LIMIT:
                raise TimeoutError(f"rank {self.rank} has waited {LIMIT:.0f} s for the others")

    def gather(self, values: list[float]) -> np.ndarray:
        """Everybody's numbers, shape (size, len(values)); at most `STEPS` of them."""
        self._told[self.rank, : len(values)] = values
        self.meet()
        told = np.array(self._told[:, : len(values)])
        self.meet()
        return told


def measure(meeting: Meeting, steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds by kind of step, a median a repeat; kinds take turns.

    A step lasts as long as its slowest process, from a common start: 10 warm-up steps, then in
    each repeat 50 timed ones of every kind, each behind an untimed barrier.
    """
    for step in steps.values():
        for _ in range(WARM):
            step()
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for _ in range(repeats):
        own: dict[str, list[float]] = {kind: [] for kind in steps}
        for _ in range(STEPS // TURN):
            for kind, step in steps.items():
                own[kind] += _turn(meeting, step)
        for kind, told in own.items():
            seconds[kind].append(float(np.median(meeting.gather(told).max(axis=0))))
    return seconds


def same(meeting: Meeting, checksum: float) -> bool:
    """Whether all processes have the same weights, by a sum of them."""
    told = meeting.gather([checksum])
    return bool(np.isfinite(told).all() and (np.ptp(told) <= 1e-6 * np.abs(told).max()))


def _turn(meeting: Meeting, step: Step) -> list[float]:
    own = []
    for _ in range(TURN):
        meeting.meet()
        start = time.perf_counter()
        step()
        own.append(time.perf_counter() - start)
    return own
