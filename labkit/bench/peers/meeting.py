"""A barrier in shared memory, and the timing of steps, for processes of other frameworks.

All measured frameworks ("peers") use this barrier and labkit's rules of timing. The module depends
only on NumPy, because it runs in the framework's Python, which may lack MPI and labkit's
dependencies.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.bench.interleave import STEPS, Step, time_interleaved

LIMIT = 120.0  # seconds to wait for another process


class Task(TypedDict):
    """The task of one process of a framework; `rank` is None if mpirun assigns ranks."""

    peer: str
    rank: int | None
    size: int
    cases: list[str]
    repeats: int
    meeting: str
    ports: list[int]


class Times(TypedDict):
    """Median seconds of each repeat, by kind of step: of a step, and added to a local step."""

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


class Agreed(Times):
    """Times of steps, and whether all processes have equal weights after the last step."""

    same_weights: bool


class Record(Agreed):
    """The result of one benchmark case, as rank 0 reports it."""

    case: str
    version: str


class Meeting:
    """A barrier and a gather among processes of one host, over a memory-mapped file.

    Args:
        path: File that contains `size_of(size)` zero bytes.
        rank: Rank of this process.
        size: Number of processes.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size, self._count = rank, size, 0
        # Each process has its own cache line for the barrier and its own row of results, because
        # writes into a shared cache line are slow.
        whole = np.memmap(path, np.float64, "r+", shape=(size, 8 + STEPS))
        self._arrived, self._results = whole[:, 0], whole[:, 8:]

    @staticmethod
    def size_of(size: int) -> int:
        """Return the size of the file in bytes for this number of processes."""
        return size * (8 + STEPS) * 8

    def barrier(self) -> None:
        """Wait until all processes have called this method; raise TimeoutError after LIMIT s."""
        self._count += 1
        self._arrived[self.rank] = self._count
        start = time.monotonic()
        while self._arrived.min() < self._count:
            # The process polls instead of sleeping, because waking up takes longer than some steps.
            # It yields the core, because processes may share a core.
            os.sched_yield()
            if time.monotonic() - start > LIMIT:
                raise TimeoutError(f"rank {self.rank} waited {LIMIT:.0f} s for the other ranks")

    def gather(self, values: list[float]) -> np.ndarray:
        """Gather at most `STEPS` numbers of each process; return shape (size, len(values))."""
        self._results[self.rank, : len(values)] = values
        self.barrier()
        results = np.array(self._results[:, : len(values)])
        # All processes must read these numbers before any process writes its next numbers.
        self.barrier()
        return results


def measure(meeting: Meeting, steps: dict[str, Step], repeats: int) -> Times:
    """Time all kinds of steps; return their medians and added times, one value per repeat."""
    taken = time_interleaved(steps, meeting.barrier, meeting.gather, repeats)
    return {"seconds": taken.seconds, "added": taken.added}


def same(meeting: Meeting, checksum: float) -> bool:
    """Return whether all processes have equal weights, by comparison of their checksums."""
    sums = meeting.gather([checksum])
    return bool(np.isfinite(sums).all() and (np.ptp(sums) <= 1e-6 * np.abs(sums).max()))
