"""Rabenseifner's allreduce: recursive halving, then recursive doubling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, Counts, chunked_cost, floor_lg
from labkit.schedules.power_of_two import folded, folded_cost, folded_counts
from labkit.schedules.round import Round


def _counts(size: int) -> Counts:
    power = 1 << floor_lg(size)
    return folded_counts(size, 2 * floor_lg(size), 2 * (power - 1), power)


def _cost(size: int) -> AlphaBetaCost:
    """Return 2 lg p α + 2(p - 1)/p nβ + (p - 1)/p nγ for p ranks, plus the cost of folding."""
    volume = chunked_cost(1 << floor_lg(size))
    return folded_cost(size, AlphaBetaCost(2 * floor_lg(size), volume.beta, volume.gamma))


@collective(all_ranks_hold(SUM), _counts, _cost)
def rabenseifner(size: int) -> Iterator[Round]:
    """Partners halve the buffer until each rank has the sum of one chunk, then exchange the sums.

        p = 4: chunks that rank 0 holds as sums of …
        halving    0 ↔ 2  sends 23, keeps 01      2 ranks
                   0 ↔ 1  sends 1, keeps 0        4 ranks
        doubling   0 ↔ 1  sends 0, gets 1         01 whole
                   0 ↔ 2  sends 01, gets 23       0123 whole

    The schedule has 2 lg p rounds (like a tree) and sends 2(p - 1)/p · n bytes per rank (like a
    ring). Each exchanged half of the buffer is one message of many chunks.

    Args:
        size: Number of ranks, at least 1; ranks beyond the largest power of two are folded
            (`folded`).

    Source: Rabenseifner 2004, *Optimization of collective reduction operations*.
    """
    return folded(size, _halving_doubling)


def _halving_doubling(size: int) -> Iterator[Round]:
    ranks = np.arange(size)
    distances = [1 << bit for bit in range(size.bit_length() - 1)]
    for distance in reversed(distances):
        partner = ranks ^ distance
        yield Round(ranks, partner, partner // distance * distance, distance, reduce=True)
    for distance in distances:
        yield Round(ranks, ranks ^ distance, ranks // distance * distance, distance, reduce=False)
