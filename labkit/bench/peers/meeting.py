"""A barrier in shared memory, and step timing, for processes of other frameworks.

All measured frameworks ("peers") use the barrier of this module and labkit's rules of timing. The
module depends only on NumPy, because it runs in the framework's Python, which may lack MPI and
labkit's dependencies.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TypedDict

import numpy as np

from labkit.bench.timing import STEPS, Step, time_interleaved

LIMIT = 120.0  # seconds to wait for another process at the barrier


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
    """Median seconds per repeat, by kind of step: of the step, and in excess of a local step."""

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


class Agreed(Times):
    """Step times, and whether all processes have equal weights after the last step."""

    same_weights: bool


class Record(Agreed):
    """The result of one benchmark case, which rank 0 reports."""

    case: str
    version: str


class Meeting:
    """A barrier and a gather for processes of one host, in a memory-mapped file.

    Args:
        path: File that contains `size_of(size)` zero bytes, where `size` is the number of
            processes.
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
        """Return how many bytes the memory-mapped file needs for `size` processes."""
        return size * (8 + STEPS) * 8

    def barrier(self) -> None:
        """Wait until all processes call this method; raise TimeoutError after LIMIT seconds."""
        self._count += 1
        self._arrived[self.rank] = self._count
        start = time.monotonic()
        while self._arrived.min() < self._count:
            # The process polls instead of sleeping, because waking up would take longer than some
            # steps. The process yields its core while it polls, because several processes may share
            # a core.
            os.sched_yield()
            if time.monotonic() - start > LIMIT:
                raise TimeoutError(f"rank {self.rank} waited {LIMIT:.0f} s for the other ranks")

    def gather(self, values: list[float]) -> np.ndarray:
        """Gather at most `STEPS` numbers of each process; return shape (size, len(values))."""
        self._results[self.rank, : len(values)] = values
        self.barrier()
        results = np.array(self._results[:, : len(values)])
        # All processes must read the gathered numbers before any process writes its next numbers.
        self.barrier()
        return results


def measure(meeting: Meeting, steps: dict[str, Step], repeats: int) -> Times:
    """Time all kinds of steps; return step times and added times, one median per repeat."""
    taken = time_interleaved(steps, meeting.barrier, meeting.gather, repeats)
    return {"seconds": taken.seconds, "added": taken.added}


def same(meeting: Meeting, checksum: float) -> bool:
    """Return whether all processes have equal weights, by comparing checksums of the weights."""
    sums = meeting.gather([checksum])
    return bool(np.isfinite(sums).all() and (np.ptp(sums) <= 1e-6 * np.abs(sums).max()))
