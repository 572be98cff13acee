"""Allreduce by recursive doubling: partners at distance 1, 2, 4, … exchange their sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, Counts, ceil_lg, floor_lg
from labkit.schedules.power_of_two import folded, folded_cost, folded_counts
from labkit.schedules.round import Round


def _counts(size: int) -> Counts:
    rounds = floor_lg(size)
    return folded_counts(size, rounds, rounds, 1)


def _cost(size: int) -> AlphaBetaCost:
    """Return the cost lg p (α + nβ + nγ) on p ranks, plus the cost of folding (`folded`)."""
    rounds = floor_lg(size)
    return folded_cost(size, AlphaBetaCost(rounds, rounds, rounds))


def _critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the candidate critical paths; ranks without a folded partner start to send earlier.

    For p = 2ᶠ + e ranks with F = ⌊lg p⌋, one of two paths is the longest. On the first path, the
    last rank without a folded partner ends after F + 1 hops. On the second path, a folded rank gets
    the result after 2 + ⌈lg e⌉ hops. This result waits in the queue behind F - ⌈lg e⌉ other
    messages on the link of its neighbour.
    """
    rounds = floor_lg(size)
    extra = size - (1 << rounds)
    if not extra:
        return (_cost(size),)
    shared = ceil_lg(extra)  # rounds in which folded ranks wait for each other
    hops, queued = AlphaBetaCost(shared + 2, shared + 2, shared + 1), rounds - shared
    last = AlphaBetaCost(rounds + 1, rounds + 1, rounds + 1)
    return last, hops + AlphaBetaCost(beta=queued), hops + AlphaBetaCost(gamma=queued)


@collective(all_ranks_hold(SUM), _counts, _cost, _critical_paths)
def butterfly(size: int) -> Iterator[Round]:
    """After round k every rank holds a sum over 2ᵏ ranks; there are lg p rounds of n bytes.

        0   1   2   3   4   5   6   7
        0 ↔ 1   2 ↔ 3   4 ↔ 5   6 ↔ 7        distance 1
        0 ↔ 2   1 ↔ 3   4 ↔ 6   5 ↔ 7        distance 2
        0 ↔ 4   1 ↔ 5   2 ↔ 6   3 ↔ 7        distance 4

    Args:
        size: Number of ranks, at least 1; ranks beyond the largest power of two are folded
            (`folded`).

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    return folded(size, _doubling)


def _doubling(size: int) -> Iterator[Round]:
    ranks = np.arange(size)
    distance = 1
    while distance < size:
        # The rank numbers of two partners differ in one bit.
        yield Round(ranks, ranks ^ distance, reduce=True)
        distance *= 2
