"""Allreduce by recursive doubling: partners at distance 1, 2, 4, … swap their sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import Cost, Counts, ceil_lg, floor_lg
from labkit.schedules.power_of_two import folded, folded_cost, folded_counts
from labkit.schedules.round import Round


def _counts(size: int) -> Counts:
    rounds = floor_lg(size)
    return folded_counts(size, rounds, rounds, 1)


def _cost(size: int) -> Cost:
    """lg p (α + nβ + nγ)."""
    rounds = floor_lg(size)
    return folded_cost(size, Cost(rounds, rounds, rounds))


def _ways(size: int) -> tuple[Cost, ...]:
    """Ranks that are not folded send early, so that nobody waits for all F + 2 hops.

    With F = ⌊lg p⌋ and p = 2ᶠ + e: either the last of the unfolded ends after F + 1, or a hidden
    rank gets the result after 2 + ⌈lg e⌉ hops, behind F - ⌈lg e⌉ messages on its neighbour's link.
    """
    rounds = floor_lg(size)
    extra = size - (1 << rounds)
    if not extra:
        return (_cost(size),)
    met = ceil_lg(extra)  # rounds in which folded ranks wait for one another
    hops, alone = Cost(met + 2, met + 2, met + 1), rounds - met
    last = Cost(rounds + 1, rounds + 1, rounds + 1)
    return last, hops + Cost(beta=alone), hops + Cost(gamma=alone)


@collective(everywhere(SUM), _counts, _cost, _ways)
def butterfly(size: int) -> Iterator[Round]:
    """After round k every rank holds the sum of its 2ᵏ neighbours: lg p rounds of n.

        0   1   2   3   4   5   6   7
        0 ↔ 1   2 ↔ 3   4 ↔ 5   6 ↔ 7        distance 1
        0 ↔ 2   1 ↔ 3   4 ↔ 6   5 ↔ 7        distance 2
        0 ↔ 4   1 ↔ 5   2 ↔ 6   3 ↔ 7        distance 4

    Args: size: number of ranks, from 1; what is no power of two is folded (`folded`).
    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    return folded(size, _doubling)


def _doubling(size: int) -> Iterator[Round]:
    ranks = np.arange(size)
    distance = 1
    while distance < size:
        # The partner differs in one bit.
        yield Round(ranks, ranks ^ distance, reduce=True)
        distance *= 2
