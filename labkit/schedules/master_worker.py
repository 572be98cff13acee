"""Allreduce through one rank: all workers send to the master, and the master replies to all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, rooted_counts
from labkit.schedules.round import Round


@collective(
    all_ranks_hold(SUM),
    counts=lambda p: rooted_counts(p, p - 1),
    cost=lambda p: AlphaBetaCost(2 * (p - 1), 2 * (p - 1), p - 1),
    # The master's link carries the messages of a round one after another, so a round has one
    # latency.
    critical_paths=lambda p: (AlphaBetaCost(2 * (p > 1), 2 * (p - 1), p - 1),),
)
def master_worker(size: int) -> Iterator[Round]:
    """Rank 0 adds the buffers of all ranks and sends the sum back.

        round 1           round 2
        1 ──┐             ┌──► 1       2(p - 1) messages of n, all of them
        2 ──┼──► 0 ═ sum ═┼──► 2       over the master's link: the bottleneck.
        3 ──┘             └──► 3

    Args:
        size: Number of ranks, at least 1.

    Source: a synchronous parameter server; Dean et al. 2012, *Large scale distributed deep
    networks*.
    """
    workers = np.arange(1, size)
    master = np.zeros_like(workers)
    if size > 1:
        yield Round(workers, master, reduce=True)
        yield Round(master, workers, reduce=False)
