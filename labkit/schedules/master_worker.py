"""Allreduce through one rank: all workers send to the master, the master sends to all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import Cost, one_or
from labkit.schedules.round import Round


@collective(
    everywhere(SUM),
    counts=lambda p: one_or(p, p - 1),
    cost=lambda p: Cost(2 * (p - 1), 2 * (p - 1), p - 1),
    # The messages of a round go over the master's link one behind the other: a latency a round.
    ways=lambda p: (Cost(2 * (p > 1), 2 * (p - 1), p - 1),),
)
def master_worker(size: int) -> Iterator[Round]:
    """Rank 0 adds up the buffers of all and sends the sum back.

        round 1           round 2
        1 ──┐             ┌──► 1       2(p - 1) messages of n, every one of them
        2 ──┼──► 0 ═ sum ═┼──► 2       over the master's link: the bottleneck.
        3 ──┘             └──► 3

    Args: size: number of ranks, from 1.
    Source: the parameter server without its asynchrony; Dean et al. 2012, *Large scale
    distributed deep networks*.
    """
    workers = np.arange(1, size)
    master = np.zeros_like(workers)
    if size > 1:
        yield Round(workers, master, reduce=True)
        yield Round(master, workers, reduce=False)
