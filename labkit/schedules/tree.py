"""Binomial trees: reduce to a root, broadcast from a root, and the allreduce that joins both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective, root_holds
from labkit.schedules.formulas import AlphaBetaCost, Counts, ceil_lg, floor_lg, rooted_counts
from labkit.schedules.round import Round


@collective(root_holds(lambda chunks: SUM), lambda p: rooted_counts(p, 0))
def reduce_tree(size: int, root: int = 0) -> Iterator[Round]:
    """The root ends with the sum, the other ranks with partial sums.

        round 1   0 ◄ 1   2 ◄ 3   4 ◄ 5   6 ◄ 7      ⌈lg p⌉ rounds, p - 1 messages of n:
        round 2   0 ◄──── 2       4 ◄──── 6          half of the active ranks
        round 3   0 ◄──────────── 4                  sends to the other half

    Args:
        size: Number of ranks, at least 1.
        root: The rank at the root, where the drawing has rank 0; the other ranks follow in cyclic
            order.

    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    names = (np.arange(size) + root) % size
    for distance in _doubling(size):
        sender = np.arange(distance, size, 2 * distance)
        yield Round(sender, sender - distance, reduce=True).on(names)


def _to_children(size: int) -> Counts:
    """Count the children of each rank r: ranks r + 2ᵏ < p with 2ᵏ below the lowest set bit of r."""
    lowest = [(rank & -rank).bit_length() - 1 if rank else size for rank in range(size)]
    room = [ceil_lg(size - rank) for rank in range(size)]
    # The highest ranks have fewer children than they would have in a full tree.
    children = np.minimum(lowest, room)
    return Counts(children, children, 1)


@collective(all_ranks_hold(0), _to_children)
def broadcast_tree(size: int, root: int = 0) -> Iterator[Round]:
    """Every rank ends with the root's buffer: `reduce_tree` in reverse.

        round 1   0 ────────────► 4
        round 2   0 ────► 2       4 ────► 6
        round 3   0 ► 1   2 ► 3   4 ► 5   6 ► 7

    Args and source: as `reduce_tree`.
    """
    names = (np.arange(size) + root) % size
    for distance in reversed(_doubling(size)):
        receiver = np.arange(distance, size, 2 * distance)
        yield Round(receiver - distance, receiver, reduce=False).on(names)


def _counts(size: int) -> Counts:
    messages = _to_children(size).messages + rooted_counts(size, 0).messages
    return Counts(messages, messages, 1)


def _cost(size: int) -> AlphaBetaCost:
    """Return the cost of a tree allreduce on p ranks: 2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ."""
    depth = ceil_lg(size)
    return AlphaBetaCost(2 * depth, 2 * depth, depth)


def _critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the critical paths; if p is not a power of two, the longest one has ⌊lg p⌋ hops.

    If p is not a power of two, the root's link still carries ⌈lg p⌉ messages in each direction.
    Therefore the time ⌊lg p⌋(2α + 2nβ + nγ) increases by nβ for the broadcast. It also increases
    for the reduction: by nβ, or by nγ if addition takes longer.
    """
    depth = floor_lg(size)
    hops = AlphaBetaCost(2 * depth, 2 * depth, depth)
    if depth == ceil_lg(size):
        return (hops,)
    return hops + AlphaBetaCost(beta=2), hops + AlphaBetaCost(beta=1, gamma=1)


@collective(all_ranks_hold(SUM), _counts, _cost, _critical_paths)
def tree(size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it: 2⌈lg p⌉ rounds, 2(p - 1) messages of n bytes.

        0 ◄ 1   2 ◄ 3          reduce
        0 ◄──── 2
        0 ────► 2              broadcast
        0 ► 1   2 ► 3

    Args:
        size: Number of ranks, at least 1.

    Source: as `reduce_tree`.
    """
    yield from reduce_tree(size)
    yield from broadcast_tree(size)


def _doubling(size: int) -> list[int]:
    """Return the powers of two below size: 1, 2, 4, …"""
    return [1 << bit for bit in range((size - 1).bit_length())]
