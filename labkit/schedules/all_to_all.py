"""Allreduce in one round: everybody sends everything to everybody."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import Cost, everybody
from labkit.schedules.round import Round, circle


@collective(
    everywhere(SUM),
    counts=lambda p: everybody(p, p - 1, 1),
    cost=lambda p: Cost(p - 1, p - 1, p - 1),
    # A rank hands all messages over at once and pays one latency.
    ways=lambda p: (Cost(p > 1, p - 1, p - 1),),
)
def all_to_all(size: int) -> Iterator[Round]:
    """Every rank sends its buffer to every other; each adds up all of them in order of rank.

        0 ──► 1 2 3        p(p - 1) messages of n: least rounds, most bytes.
        1 ──► 2 3 0
        2 ──► 3 0 1        rows by step k: r ──► r + k, so that receivers take turns
        3 ──► 0 1 2

    Args: size: number of ranks, from 1.
    Source: folklore; the least that any allreduce needs is one round.
    """
    if size > 1:
        # Around the circle: in the order of ranks all would send to rank 0 first.
        source, destination = circle(size)
        yield Round(source, destination, reduce=True)
