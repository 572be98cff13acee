"""One process of another framework, which measures the cases of its task.

    python foreign.py labkit.bench.peers.rank '{"peer": "ddp", "rank": 0, "cases": ["cnn"], ...}'

All measured frameworks ("peers") use the shared-memory barrier of this module. Their steps are
timed in the same way as labkit's steps. `labkit.frameworks.foreign` starts this module. The module
depends only on NumPy, because it runs in the framework's Python. The framework's Python may lack
MPI and labkit's dependencies. Rank 0 prints the results.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike

from labkit.bench.steps import CASES
from labkit.bench.timing import STEPS, Step, time_interleaved

# At the barrier, a process waits at most LIMIT seconds for another process.
LIMIT = 120.0
# The dictionary MODULES maps each framework to the labkit module that measures it.
MODULES = {
    "multi_worker_mirrored": "tensorflow",
    "ddp": "torch",
    "fsdp": "torch",
    "horovod": "tensorflow",
    "jax": "jax",
}


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
    """Median step times of a benchmark, with one value per repeat."""

    seconds: dict[str, list[float]]
    added: dict[str, list[float]]


class Agreed(Times):
    """Step times, and whether the weights of all processes are equal after the last step."""

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
        # Each process has its own cache line for the barrier, and its own row of results. If two
        # processes wrote into the same cache line, their writes would be slow.
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
        """Gather `STEPS` or fewer numbers per process; return an array (size, len(values))."""
        self._results[self.rank, : len(values)] = values
        self.barrier()
        results = np.array(self._results[:, : len(values)])
        # All processes must read the gathered numbers before any process writes its next numbers.
        self.barrier()
        return results


def measure(meeting: Meeting, steps: dict[str, Step], repeats: int) -> Times:
    """Measure all kinds of steps; return one median step time and added time per repeat."""
    taken = time_interleaved(steps, meeting.barrier, meeting.gather, repeats)
    return {"seconds": taken.seconds, "added": taken.added}


def same(meeting: Meeting, checksum: float) -> bool:
    """Return whether all processes have equal weights, by comparing checksums of the weights."""
    sums = meeting.gather([checksum])
    return bool(np.isfinite(sums).all() and (np.ptp(sums) <= 1e-6 * np.abs(sums).max()))


def agreed(meeting: Meeting, times: Times, total: ArrayLike, checksum: float) -> Agreed:
    """Return step times, and whether the weights are equal and the test allreduce is right.

    Args:
        meeting: Barrier of all processes.
        times: Measured step times.
        total: Sum of a test allreduce over all processes. Each process contributes an array whose
            values are its rank plus 1. Only an allreduce of known values is verified, because the
            correct sum of a step's gradients is unknown.
        checksum: Checksum of this process's weights after the last step.
    """
    right = np.allclose(total, meeting.size * (meeting.size + 1) / 2)
    return Agreed(**times, same_weights=same(meeting, checksum) and bool(right))


def main(task: Task) -> None:
    """Measure the cases; rank 0 prints one JSON line per case."""
    module = import_module(f"labkit.bench.peers.{MODULES[task['peer']]}")
    # The launcher mpirun passes the rank to a process in an environment variable.
    rank = task["rank"] if task["rank"] is not None else int(os.environ["OMPI_COMM_WORLD_RANK"])
    meeting = Meeting(Path(task["meeting"]), rank, task["size"])
    peer = module.PEERS[task["peer"]](meeting, task)
    for name in task["cases"]:
        result = peer.measure(CASES[name], task["repeats"])
        if rank == 0:
            print(json.dumps({"case": name, "version": peer.version} | result), flush=True)
    # All processes wait here, because a process that leaves early may end services that other
    # processes still use.
    meeting.barrier()
    peer.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
