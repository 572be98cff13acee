"""Allreduce by recursive doubling: partners at distance 1, 2, 4, … swap their sums."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.fold import folded
from labkit.schedules.round import Round


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
        yield Round(ranks, ranks ^ distance, reduce=True)
        distance *= 2
