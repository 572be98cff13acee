"""Direct allreduce: each chunk has a home; all send to the homes, the homes send to all."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import by_parts, by_parts_cost, two_rounds_of_parts
from labkit.schedules.round import Round, circle


@collective(everywhere(SUM), by_parts, by_parts_cost, two_rounds_of_parts)
def round_robin(size: int) -> Iterator[Round]:
    """Chunk i has its home at rank i, which adds it up and sends the sum to everybody.

        round 1, step k: r ── chunk r + k ──► r + k      round 2, step k: r ── chunk r ──► r + k

              step 1     step 2     step 3
        0     1 ► 1      2 ► 2      3 ► 3                chunk ► home
        1     2 ► 2      3 ► 3      0 ► 0
        2     3 ► 3      0 ► 0      1 ► 1
        3     0 ► 0      1 ► 1      2 ► 2

    As many messages and bytes as the ring (2(p - 1) of n/p a rank), but no message of a round
    waits for another: the steps are the order in which a link takes them, and no receiver is
    addressed twice in one step.

    Args: size: number of ranks, from 1.
    Source: the "round-robin" allreduce of Zhao and Canny 2013, *Sparse Allreduce*
    (arXiv 1312.3020), and of Kylix (2014).
    """
    if size > 1:
        source, destination = circle(size)
        yield Round(source, destination, destination, reduce=True)
        yield Round(source, destination, source, reduce=False)
