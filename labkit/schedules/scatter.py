"""Scatter: one rank sends a different chunk to every other rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import collective, owners_hold
from labkit.schedules.formulas import Counts
from labkit.schedules.round import Round


def _root_counts(size: int) -> Counts:
    sent = np.where(np.arange(size) == 0, size - 1, 0)
    return Counts(sent, sent, size)


@collective(owners_hold(0), _root_counts)
def scatter(size: int, root: int = 0) -> Iterator[Round]:
    """Every rank i receives chunk i of the root, in one round of p - 1 messages of n/p bytes.

             ┌── chunk 1 ──► 1
        0 ───┼── chunk 2 ──► 2
             └── chunk 3 ──► 3

    Args:
        size: Number of ranks, at least 1.
        root: The rank that sends the chunks.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(np.full_like(others, root), others, others, reduce=False)
