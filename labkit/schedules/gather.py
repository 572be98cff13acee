"""Gather: one rank collects a chunk from each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import at_root, collective
from labkit.schedules.formulas import one_or
from labkit.schedules.round import Round


@collective(at_root(np.arange), lambda p: one_or(p, 0, p))
def gather(size: int, root: int = 0) -> Iterator[Round]:
    """The root ends with chunk i of rank i, for all i; p - 1 messages of n/p in one round.

        1 ── chunk 1 ──┐
        2 ── chunk 2 ──┼──► 0
        3 ── chunk 3 ──┘

    Args: size: number of ranks, from 1; root: the rank that collects.
    """
    others = np.delete(np.arange(size), root)
    if size > 1:
        yield Round(others, np.full_like(others, root), others, reduce=False)
