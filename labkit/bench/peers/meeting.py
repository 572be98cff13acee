"""How a peer's processes meet and time their steps: by labkit's rule, with nobody's own barrier.

Runs in the peer's Python, which may have neither labkit's dependencies nor MPI: NumPy only.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.bench.interleave import STEPS, Step, take

LIMIT = 120.0  # seconds to wait for another process


class Task(TypedDict):
    """What a process of a peer is to do; `rank` is None where mpirun numbers its processes."""

    peer: str
    rank: int | None
    size: int
    cases: list[str]
    repeats: int
    meeting: str
    ports: list[int]


class Times(TypedDict):
    """Kind of step -> a median a repeat, s: of the step, and of what it adds to the local one."""

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


class Agreed(Times):
    """The same, and whether all processes ended with the same weights."""

    same_weights: bool


class Record(Agreed):
    """What rank 0 tells of a case."""

    case: str
    version: str


class Meeting:
    """Processes of one host that meet over a file which they map into memory.

    Args:
        path: a file of zeros, `size_of(size)` bytes.
        rank, size: this process's number, and how many there are.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size, self._count = rank, size, 0
        # A cache line and a row of results for each process.
        # A line of its own for each: processes that write into one cache line would slow each
        # other.
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
            # Polled, not slept: to wake up takes longer than some of the steps; it yields, for
            # ranks may share a core.
            os.sched_yield()
            if time.monotonic() - start > LIMIT:
                raise TimeoutError(f"rank {self.rank} has waited {LIMIT:.0f} s for the others")

    def gather(self, values: list[float]) -> np.ndarray:
        """Everybody's numbers, shape (size, len(values)); at most `STEPS` of them."""
        self._told[self.rank, : len(values)] = values
        self.meet()
        told = np.array(self._told[:, : len(values)])
        # Nobody may write the next numbers before all have read these.
        self.meet()
        return told


def measure(meeting: Meeting, steps: dict[str, Step], repeats: int) -> Times:
    """Seconds by kind of step, and what each adds to the local one; a value a repeat."""
    taken = take(steps, meeting.meet, meeting.gather, repeats)
    return {"seconds": taken.seconds, "added": taken.added}


def same(meeting: Meeting, checksum: float) -> bool:
    """Whether all processes have the same weights, by a sum of them."""
    told = meeting.gather([checksum])
    return bool(np.isfinite(told).all() and (np.ptp(told) <= 1e-6 * np.abs(told).max()))
