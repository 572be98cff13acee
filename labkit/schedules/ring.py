"""The ring: reduce-scatter, allgather, and the allreduce that combines both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective, owners_hold
from labkit.schedules.formulas import AlphaBetaCost, chunked_cost, chunked_counts, uniform_counts
from labkit.schedules.round import Integers, Round


@collective(
    owners_hold(SUM),
    lambda p: uniform_counts(p, p - 1, p),
    lambda p: AlphaBetaCost(p - 1, (p - 1) / p, (p - 1) / p),
)
def reduce_scatter_ring(size: int) -> Iterator[Round]:
    """Rank r ends with the sum of chunk r: partial sums travel once around the ring.

        p = 4         round 1    round 2    round 3          0 ──► 1
        0 ──► 1       chunk 3    chunk 2    chunk 1          ▲     │
        1 ──► 2       chunk 0    chunk 3    chunk 2          │     ▼
        2 ──► 3       chunk 1    chunk 0    chunk 3          3 ◄── 2
        3 ──► 0       chunk 2    chunk 1    chunk 0

    Args:
        size: Number of ranks, at least 1.

    Source: Patarasuk and Yuan 2009, *Bandwidth optimal all-reduce algorithms for clusters of
    workstations*.
    """
    return _around(size, first=-1, reduce=True)


@collective(
    lambda size, chunks: np.tile(np.arange(chunks), (size, 1)),
    lambda p: uniform_counts(p, p - 1, p),
    lambda p: AlphaBetaCost(p - 1, (p - 1) / p),
)
def allgather_ring(size: int) -> Iterator[Round]:
    """Every rank ends with chunk i of rank i, for all i: chunks travel once around the ring.

        p = 4         round 1    round 2    round 3
        0 ──► 1       chunk 0    chunk 3    chunk 2
        1 ──► 2       chunk 1    chunk 0    chunk 3
        2 ──► 3       chunk 2    chunk 1    chunk 0
        3 ──► 0       chunk 3    chunk 2    chunk 1

    Args and source: as `reduce_scatter_ring`.
    """
    return _around(size, first=0, reduce=False)


@collective(all_ranks_hold(SUM), chunked_counts, chunked_cost, gathers=allgather_ring)
def ring(size: int) -> Iterator[Round]:
    """Reduce-scatter, then allgather: 2(p - 1) rounds with one n/p-byte message per rank.

        +──► chunk r - 1 - k in round k, added         then         chunk r - k, replaced
        0 ──► 1 ──► 2 ──► 3 ──► 0

    Each rank sends 2(p - 1)/p · n bytes, which is the minimum for an allreduce.

    Args and source: as `reduce_scatter_ring`.
    """
    yield from reduce_scatter_ring(size)
    yield from allgather_ring(size)


def _around(size: int, first: int, reduce: bool) -> Iterator[Round]:
    """Yield rounds k = 0, 1, …: rank r sends chunk r + first - k to rank r + 1."""
    ranks = np.arange(size)
    following = (ranks + 1) % size
    span, adds = np.ones_like(ranks), np.full(size, reduce)
    tape: Integers = np.arange(2 * size) % size  # each round uses a view of this array, not a copy
    for step in range(size - 1):
        start = (first - step) % size
        yield Round(ranks, following, tape[start : start + size], span, reduce=adds)
