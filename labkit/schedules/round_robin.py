"""Direct allreduce: each rank sends chunk i to its owner, rank i, which sends the sum to all."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import chunked_cost, chunked_counts, two_round_costs
from labkit.schedules.round import Round, circle


@collective(all_ranks_hold(SUM), chunked_counts, chunked_cost, two_round_costs)
def round_robin(size: int) -> Iterator[Round]:
    """Rank i adds the contributions to chunk i and sends the sum to every other rank.

        round 1, step k: r ── chunk r + k ──► r + k      round 2, step k: r ── chunk r ──► r + k

              step 1     step 2     step 3
        0     1 ► 1      2 ► 2      3 ► 3                chunk ► owner
        1     2 ► 2      3 ► 3      0 ► 0
        2     3 ► 3      0 ► 0      1 ► 1
        3     0 ► 0      1 ► 1      2 ► 2

    Each rank sends 2(p - 1) messages of n/p bytes, as in the ring. Unlike in the ring, no message
    of a round waits for another. A rank's link carries the messages in the order of the steps, so
    each receiver gets one message per step.

    Args:
        size: Number of ranks, at least 1.

    Source: the "round-robin" allreduce of Zhao and Canny 2013, *Sparse Allreduce*
    (arXiv 1312.3020), and of Kylix (2014).
    """
    if size > 1:
        source, destination = circle(size)
        yield Round(source, destination, destination, reduce=True)
        yield Round(source, destination, source, reduce=False)
