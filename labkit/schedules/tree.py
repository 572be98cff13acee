"""Binomial trees: reduce to a root, broadcast from it, and the allreduce of both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, at_root, collective, everywhere
from labkit.schedules.formulas import Cost, Counts, ceil_lg, floor_lg, one_or
from labkit.schedules.round import Round


@collective(at_root(lambda chunks: SUM), lambda p: one_or(p, 0))
def reduce_tree(size: int, root: int = 0) -> Iterator[Round]:
    """The root ends with the sum; the others with partial sums.

        round 1   0 ◄ 1   2 ◄ 3   4 ◄ 5   6 ◄ 7      ⌈lg p⌉ rounds, p - 1 messages of n:
        round 2   0 ◄──── 2       4 ◄──── 6          half of those still in
        round 3   0 ◄──────────── 4                  send to the other half

    Args: size: number of ranks, from 1; root: the rank in the place of 0 (the others follow
    around the circle).
    Source: Thakur, Rabenseifner and Gropp 2005, *Optimization of collective communication
    operations in MPICH*.
    """
    names = (np.arange(size) + root) % size
    for distance in _doubling(size):
        sender = np.arange(distance, size, 2 * distance)
        yield Round(sender, sender - distance, reduce=True).on(names)


def _to_children(size: int) -> Counts:
    """Children in the binomial tree: r + 2ᵏ < p for 2ᵏ below the lowest set bit of r."""
    lowest = [(rank & -rank).bit_length() - 1 if rank else size for rank in range(size)]
    room = [ceil_lg(size - rank) for rank in range(size)]
    # The last ranks have fewer children than their place would allow.
    children = np.minimum(lowest, room)
    return Counts(children, children, 1)


@collective(everywhere(0), _to_children)
def broadcast_tree(size: int, root: int = 0) -> Iterator[Round]:
    """Every rank ends with the root's buffer: `reduce_tree` backwards.

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
    messages = _to_children(size).messages + one_or(size, 0).messages
    return Counts(messages, messages, 1)


def _cost(size: int) -> Cost:
    """2⌈lg p⌉(α + nβ) + ⌈lg p⌉nγ."""
    depth = ceil_lg(size)
    return Cost(2 * depth, 2 * depth, depth)


def _ways(size: int) -> tuple[Cost, ...]:
    """Where p is no power of two, no way through the tree has ⌈lg p⌉ hops: the longest has ⌊lg p⌋.

    But the root's link still carries ⌈lg p⌉ messages each way, so that one more nβ (or, where
    adding takes longer, nγ) up and nβ down come to ⌊lg p⌋(2α + 2nβ + nγ).
    """
    depth = floor_lg(size)
    hops = Cost(2 * depth, 2 * depth, depth)
    if depth == ceil_lg(size):
        return (hops,)
    return hops + Cost(beta=2), hops + Cost(beta=1, gamma=1)


@collective(everywhere(SUM), _counts, _cost, _ways)
def tree(size: int) -> Iterator[Round]:
    """Reduce to rank 0, then broadcast from it: 2⌈lg p⌉ rounds, 2(p - 1) messages of n.

        0 ◄ 1   2 ◄ 3          reduce
        0 ◄──── 2
        0 ────► 2              broadcast
        0 ► 1   2 ► 3

    Args: size: number of ranks, from 1.
    Source: as `reduce_tree`.
    """
    yield from reduce_tree(size)
    yield from broadcast_tree(size)


def _doubling(size: int) -> list[int]:
    """1, 2, 4, … below size."""
    return [1 << bit for bit in range((size - 1).bit_length())]
