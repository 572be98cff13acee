"""Scatter: one rank hands a chunk to each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import at_home, collective
from labkit.schedules.formulas import Counts
from labkit.schedules.round import Round


def _by_the_root(size: int) -> Counts:
    sent = np.where(np.arange(size) == 0, size - 1, 0)
    return Counts(sent, sent, size)


@collective(at_home(0), _by_the_root)
def scatter(size: int, root: int = 0) -> Iterator[Round]:
    """Rank i ends with chunk i of the root; p - 1 messages of n/p in one round.

             ┌── chunk 1 ──► 1
        0 ───┼── chunk 2 ──► 2
             └── chunk 3 ──► 3

    Args: size: number of ranks, from 1; root: the rank that hands out.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(np.full_like(others, root), others, others, reduce=False)
