"""Schedules for powers of two, extended to any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.round import Round, Schedule, count_chunks


def folded(size: int, schedule: Schedule) -> Iterator[Round]:
    """Run a schedule for 2ᵐ ranks on any number: the ranks too many hide behind a neighbour.

        p = 6, 2ᵐ = 4        0 ◄ 1   2 ◄ 3   4   5      fold in: the odd neighbour's buffer
                             0 ····· 2 ····· 4 · 5      the schedule, for four
                             0 ► 1   2 ► 3              fold out: the result

    Costs 2(α + nβ) + nγ more, and two messages of n for each of the p - 2ᵐ hidden ranks.

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    power = 1 << (size.bit_length() - 1)
    even = 2 * np.arange(size - power)
    whole = count_chunks(schedule(power))
    if power < size:
        yield Round(even + 1, even, span=whole, reduce=True)
    for each in schedule(power):
        yield each.on(np.concatenate([even, np.arange(2 * len(even), size)]))
    if power < size:
        yield Round(even, even + 1, span=whole, reduce=False)
