"""Verification and timing of an allreduce over any transport, and fields common to all rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")

# A `Row` is one measurement: times are in ms, sizes in bytes, and shares are from 0 to 1; see
# `head`.
Row: TypeAlias = "dict[str, str | float | None]"


class TimedRanks(Protocol):
    """The interface that is needed to time an allreduce; `Communicator` implements it."""

    rank: int
    size: int

    def barrier(self, label: str = ...) -> None:
        """Wait until all ranks have called the barrier."""

    def allgather(self, value: T) -> list[T]:
        """Return the values of all ranks in rank order."""

    def allreduce(self, buffer: np.ndarray, algorithm: str) -> None:
        """Replace the content of the buffer by the sum of all ranks' buffers."""


def verify_sum(ranks: TimedRanks, algorithm: str, buffer: np.ndarray) -> bool:
    """Run a first allreduce (also a warm-up); return whether its sums are exact on all ranks."""
    # In float32, sums of small whole numbers are exact in any order.
    index = np.arange(len(buffer)) % 1000
    buffer[...] = index * (ranks.rank + 1)
    ranks.allreduce(buffer, algorithm)
    total = ranks.size * (ranks.size + 1) // 2
    return all(ranks.allgather(bool(np.array_equal(buffer, index * total))))


def timed(ranks: TimedRanks, algorithm: str, buffer: np.ndarray, calls: int) -> np.ndarray:
    """Return the seconds of each call on its slowest rank, as an array of shape (calls,)."""
    buffer[...] = 0.0  # repeated sums of nonzero values would overflow
    seconds = []
    for _ in range(calls):
        ranks.barrier("the barrier before the next timed call")
        # The clock starts after the barrier, because the time of waiting for other ranks does not
        # count.
        start = time.perf_counter()
        ranks.allreduce(buffer, algorithm)
        seconds.append(time.perf_counter() - start)
    slowest: np.ndarray = np.max(ranks.allgather(seconds), axis=0)
    return slowest


def sweep(ranks: TimedRanks, cases: list[tuple[str, int, int]]) -> list[tuple[float, bool]]:
    """Measure cases (algorithm, bytes, calls); return their median seconds and correctness."""
    results = []
    for algorithm, nbytes, calls in cases:
        buffer = np.zeros(nbytes // 4, np.float32)
        right = verify_sum(ranks, algorithm, buffer)
        results.append((float(np.median(timed(ranks, algorithm, buffer, calls))), right))
    return results


def head(
    bench: str, case: str, variant: str, workers: int, network: str | None = None, **more: int
) -> Row:
    """Return the fields that all benchmark rows have in common.

    Args:
        bench: Name of the benchmark in `labkit bench`.
        case: The subject of the measurement, such as a model.
        variant: The operation that is timed; it becomes the field `what` of the row.
        workers: Number of ranks or processes.
        network: Emulated or real network; None: the machine's network.
        more: The fields `repeats` and `bytes`, if known.
    """
    row: Row = {"bench": bench, "case": case, "what": variant, "workers": workers}
    return row | {"network": network, "clock": "wall"} | more


def spread(seconds: Sequence[float]) -> Row:
    """Return fields with median, minimum and 90th percentile (ms) of the repeats' times."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "min_ms": 1e3 * min(seconds),
        "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
    }


def added(seconds: Sequence[float]) -> Row:
    """Return fields with median, minimum and maximum (ms) of the time added to a local step."""
    return {
        "added_ms": 1e3 * float(np.median(seconds)),
        "added_min_ms": 1e3 * min(seconds),
        "added_max_ms": 1e3 * max(seconds),
    }
