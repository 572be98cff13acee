"""Extension of schedules for a power of two of ranks to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.formulas import AlphaBetaCost, Counts, ceil_lg, floor_lg
from labkit.schedules.round import Round, Schedule, count_chunks


def folded(size: int, schedule: Schedule) -> Iterator[Round]:
    """Run a schedule for 2ᵐ ranks on p ranks: surplus ranks first add their buffer to another's.

        p = 6, 2ᵐ = 4        0 ◄ 1   2 ◄ 3   4   5      fold in: the odd neighbour's buffer
                             0 ····· 2 ····· 4 · 5      the schedule, for four
                             0 ► 1   2 ► 3              fold out: the result

    Compared with 2ᵐ ranks, folding takes the additional time 2(α + nβ) + nγ. It also adds two
    messages of n bytes for each of the p - 2ᵐ folded ranks.

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    power = 1 << floor_lg(size)
    even = 2 * np.arange(size - power)
    whole = count_chunks(schedule(power))
    if power < size:
        yield Round(even + 1, even, span=whole, reduce=True)
    for step in schedule(power):
        yield step.on(np.concatenate([even, np.arange(2 * len(even), size)]))
    if power < size:
        yield Round(even, even + 1, span=whole, reduce=False)


def folded_counts(size: int, messages: int, volume: int, chunks: int) -> Counts:
    """Return the counts with folding: both ranks of a folded pair send one more whole buffer.

    Args:
        size: Number of ranks.
        messages: Number of messages that each rank sends in the power-of-two schedule.
        volume: Number of chunks that each rank sends in the power-of-two schedule.
        chunks: Number of equal parts of the buffer.
    """
    rank, hidden = np.arange(size), 2 * (size - (1 << floor_lg(size)))
    whole = (rank < hidden).astype(np.int64)
    takes_part = (rank >= hidden) | (rank % 2 == 0)
    return Counts(takes_part * messages + whole, takes_part * volume + whole * chunks, chunks)


def folded_cost(size: int, cost: AlphaBetaCost) -> AlphaBetaCost:
    """Return a power-of-two schedule's cost, plus that of folding if `size` requires folding."""
    return cost + AlphaBetaCost(2, 2, 1) if floor_lg(size) < ceil_lg(size) else cost
