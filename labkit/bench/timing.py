"""How benchmarks check and time an allreduce, whatever carries its messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

T = TypeVar("T")

# One measurement as it is written: times in ms, sizes in bytes, shares from 0 to 1; see `head`.
Row: TypeAlias = "dict[str, str | float | None]"


class Ranks(Protocol):
    """What a timed allreduce needs; `Communicator` is one."""

    rank: int
    size: int

    def meet(self, what: str = ...) -> None:
        """Come back at the same time as the other ranks."""

    def allgather(self, value: T) -> list[T]:
        """Everybody's value, by rank."""

    def allreduce(self, buffer: np.ndarray, algorithm: str) -> None:
        """The sum of all buffers, in place."""


def check(ranks: Ranks, algorithm: str, buffer: np.ndarray) -> bool:
    """Whether whole numbers, which add exactly, come out right on every rank; also the warm-up."""
    # Small whole numbers: float32 adds them without rounding, in any order.
    index = np.arange(len(buffer)) % 1000
    buffer[...] = index * (ranks.rank + 1)
    ranks.allreduce(buffer, algorithm)
    total = ranks.size * (ranks.size + 1) // 2
    return all(ranks.allgather(bool(np.array_equal(buffer, index * total))))


def timed(ranks: Ranks, algorithm: str, buffer: np.ndarray, calls: int) -> np.ndarray:
    """Seconds of each call, from a common start to the end of the slowest rank, shape (calls,)."""
    buffer[...] = 0.0  # sums of sums would overflow
    own = []
    for _ in range(calls):
        ranks.meet("the next call of a benchmark")
        # After the meeting: to wait for the others is no part of the call.
        start = time.perf_counter()
        ranks.allreduce(buffer, algorithm)
        own.append(time.perf_counter() - start)
    slowest: np.ndarray = np.max(ranks.allgather(own), axis=0)
    return slowest


def sweep(ranks: Ranks, cases: list[tuple[str, int, int]]) -> list[tuple[float, bool]]:
    """The median call in s, and whether sums are right, of each (algorithm, bytes, calls)."""
    done = []
    for algorithm, nbytes, calls in cases:
        buffer = np.zeros(nbytes // 4, np.float32)
        right = check(ranks, algorithm, buffer)
        done.append((float(np.median(timed(ranks, algorithm, buffer, calls))), right))
    return done


def head(
    bench: str, case: str, what: str, workers: int, network: str | None = None, **more: int
) -> Row:
    """How every row begins: what was measured, of what, on how many ranks, over which network.

    Args:
        bench: the benchmark, as `labkit bench` calls it.
        case: what was worked on.
        what: the kind of work.
        workers: ranks or processes.
        network: the emulated or other network; None: the machine's own.
        more: `repeats` and `bytes`, where they are known by then.
    """
    row: Row = {"bench": bench, "case": case, "what": what, "workers": workers}
    return row | {"network": network, "clock": "wall"} | more


def spread(seconds: Sequence[float]) -> Row:
    """Median, least and 90th percentile of the repeats' medians, ms."""
    return {
        "median_ms": 1e3 * float(np.median(seconds)),
        "min_ms": 1e3 * min(seconds),
        "p90_ms": 1e3 * float(np.percentile(seconds, 90)),
    }


def added(seconds: Sequence[float]) -> Row:
    """What exchanging adds to the local step, by repeat: median, least and most, ms."""
    return {
        "added_ms": 1e3 * float(np.median(seconds)),
        "added_min_ms": 1e3 * min(seconds),
        "added_max_ms": 1e3 * max(seconds),
    }
