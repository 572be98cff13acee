"""Gather: one rank receives a chunk from every other rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import collective, root_holds
from labkit.schedules.formulas import rooted_counts
from labkit.schedules.round import Round


@collective(root_holds(np.arange), lambda p: rooted_counts(p, 0, p))
def gather(size: int, root: int = 0) -> Iterator[Round]:
    """The root receives chunk i from every rank i, in one round of p - 1 messages of n/p bytes.

        1 ── chunk 1 ──┐
        2 ── chunk 2 ──┼──► 0
        3 ── chunk 3 ──┘

    Args:
        size: Number of ranks, at least 1.
        root: The rank that receives the chunks.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(others, np.full_like(others, root), others, reduce=False)
