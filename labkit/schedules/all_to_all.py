"""Allreduce in one round: every rank sends its whole buffer to every other rank."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, uniform_counts
from labkit.schedules.round import Round, circle


@collective(
    all_ranks_hold(SUM),
    counts=lambda p: uniform_counts(p, p - 1, 1),
    cost=lambda p: AlphaBetaCost(p - 1, p - 1, p - 1),
    # A rank submits all its messages at once, so it pays the latency only once.
    critical_paths=lambda p: (AlphaBetaCost(p > 1, p - 1, p - 1),),
)
def all_to_all(size: int) -> Iterator[Round]:
    """Every rank sends its buffer to every other rank and adds all buffers in rank order.

        0 ──► 1 2 3        p(p - 1) messages of n: least rounds, most bytes.
        1 ──► 2 3 0
        2 ──► 3 0 1        rows by step k: r ──► r + k, so that receivers take turns
        3 ──► 0 1 2

    Args:
        size: Number of ranks, at least 1.

    Source: folklore; one round is the minimum for any allreduce.
    """
    if size > 1:
        # If destinations were in plain rank order, all ranks would send to rank 0 first.
        source, destination = circle(size)
        yield Round(source, destination, reduce=True)
