"""Allreduce over several spanning trees that together fully use links of unequal speed (Blink)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.schedules.collective import (
    SUM,
    all_ranks_hold,
    chunked_cost,
    chunked_counts,
    collective,
    two_round_costs,
)
from labkit.schedules.round import Round, run_concurrently

Links: TypeAlias = Mapping[tuple[int, int], float]
Edge: TypeAlias = tuple[int, int]  # (parent, child)
# A `Tree` holds the edges of each level, from the root downwards.
Tree: TypeAlias = tuple[tuple[Edge, ...], ...]


# The cost formulas assume equal links, for which the packed trees are p stars, one per rank.
@collective(all_ranks_hold(SUM), chunked_counts, chunked_cost, two_round_costs, layout="links")
def spanning_trees(size: int, links: Links | None = None, pieces: int = 1) -> Iterator[Round]:
    r"""Each tree sums a part of the buffer up to its root, then sends the sum down.

        links 0 === 1        tree A 0 --- 1        tree B 0 --- 1        0 = 1 is twice as
               \   /                 \                       /          fast: both trees use
                 2                     2                   2            it, half a buffer each

    If all links are equal, the trees are p stars for p ranks. Each star carries 1/p of the buffer.

    Args:
        size: Number of ranks, at least 1.
        links: Mapping (source, destination) -> bandwidth, in any unit. links: Mapping (source,
            destination) -> bandwidth, in any unit. A tree uses each of its links in both
            directions. If the two directions differ, the lower bandwidth is used.
        pieces: Number of pieces into which each tree divides its part of the buffer. With several
            pieces, all levels of a tree work at the same time.

    Raises:
        InvalidInput: If the links do not connect all ranks.

    Source: Wang et al. 2019, *Blink* (arXiv 1910.04940). Difference from the paper: `pack` adds the
        trees one by one. Blink uses multiplicative weights and reduces the number of trees by an
        integer program.
    """
    if pieces < 1:
        raise InvalidInput(
            f"pieces={pieces} is too few; give 1 or more pieces per rank's share of the buffer"
        )
    if size == 1:
        return
    trees = {_star(size, rank): 1 for rank in range(size)} if links is None else pack(size, links)
    streams = []
    start = 0
    for tree, weight in trees.items():
        for piece in range(pieces):
            # Each piece starts one round after the previous piece. The pieces therefore form a
            # pipeline through the levels of the tree.
            streams.append(chain(repeat(None, piece), _up_and_down(tree, start, weight)))
            start += weight
    for step in run_concurrently(streams):
        # Messages leave in the rotated order of the function `circle`. Trees with different roots
        # therefore never share a link at one time.
        yield step.take(np.argsort((step.destination - step.source) % size, kind="stable"))


def pack(size: int, links: Links, shares: int | None = None) -> dict[Tree, int]:
    """Return spanning trees with integer weights, which load all links evenly.

    Packing is greedy. Each of `shares` steps adds the minimum spanning tree for the link cost (load
    + 1) / bandwidth. Of all spanning trees, the minimum spanning tree has the smallest load on its
    most loaded link. The weights approach the best fractional packing as the number of added trees
    grows.

    Args:
        size: Number of ranks.
        links: Mapping (source, destination) -> bandwidth, in any unit.
        shares: Number of trees to add, including repeated trees; default: 4 · size.

    Returns: One weight per distinct tree: the number of buffer chunks that the tree carries.

    Source: Young 1995, *Randomized rounding without solving the linear program*; Thorup 2007,
    *Fully-dynamic min-cut*.
    """
    bandwidth = _symmetric(size, links)
    load = np.zeros((size, size))
    weights: Counter[Tree] = Counter()
    roots: Counter[int] = Counter()
    for _ in range(4 * size if shares is None else shares):
        with np.errstate(divide="ignore"):
            edges = _minimum_tree((load + 1) / bandwidth)
        for first, second in edges:
            # The sum goes up each tree and comes down again. The sum therefore loads both
            # directions of a link.
            load[[first, second], [second, first]] += 1
        # A root in the centre of the tree keeps the tree shallow. If a tree has two centres, the
        # rank that is the root of fewer trees becomes the root.
        root = min(_centres(size, edges), key=lambda rank: roots[rank])
        roots[root] += 1
        weights[_levels(size, edges, root)] += 1
    # A tree's weight is its number of chunks. A division of all weights by their greatest common
    # divisor gives fewer, larger chunks.
    common = math.gcd(*weights.values())
    return {tree: weight // common for tree, weight in weights.items()}


def _star(size: int, root: int) -> Tree:
    return (tuple((root, rank) for rank in range(size) if rank != root),)


def _up_and_down(tree: Tree, chunk: int, span: int) -> Iterator[Round]:
    levels = [np.array(level).T for level in tree]
    for parent, child in reversed(levels):
        yield Round(child, parent, chunk, span, reduce=True)
    for parent, child in levels:
        yield Round(parent, child, chunk, span, reduce=False)


def _symmetric(size: int, links: Links) -> NDArray[np.float64]:
    bandwidth = np.zeros((size, size))
    for (source, destination), value in links.items():
        if not (0 <= source < size and 0 <= destination < size and value > 0):
            raise InvalidInput(
                f"link ({source}, {destination}) of bandwidth {value} is impossible; give "
                f"ranks from 0 to {size - 1} and a bandwidth above 0"
            )
        bandwidth[source, destination] = value
    return np.minimum(bandwidth, bandwidth.T)


def _minimum_tree(cost: NDArray[np.float64]) -> list[Edge]:
    """Return the edges of a minimum spanning tree, by Prim's algorithm.

    Among edges of equal cost, Prim's algorithm prefers the rank that joined first. The preference
    for early ranks keeps trees shallow.
    """
    cost_to, nearest = cost[0].copy(), np.zeros(len(cost), np.int64)
    isolated = np.arange(len(cost)) > 0
    edges = []
    while isolated.any():
        rank = int(np.argmin(np.where(isolated, cost_to, np.inf)))
        if not isolated[rank] or np.isinf(cost_to[rank]):
            raise InvalidInput(
                f"links do not connect rank {int(np.flatnonzero(isolated)[0])} to rank 0 in both "
                f"directions; add links until every rank can be reached"
            )
        edges.append((int(nearest[rank]), rank))
        isolated[rank] = False
        closer = isolated & (cost[rank] < cost_to)
        cost_to[closer], nearest[closer] = cost[rank][closer], rank
    return edges


def _neighbours(size: int, edges: list[Edge]) -> dict[int, set[int]]:
    neighbours: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for first, second in edges:
        neighbours[first].add(second)
        neighbours[second].add(first)
    return neighbours


def _centres(size: int, edges: list[Edge]) -> list[int]:
    """Return the one or two central ranks of a tree, found by repeated removal of all leaves."""
    neighbours = _neighbours(size, edges)
    while len(neighbours) > 2:
        # The list of leaves is complete before the loop starts, because the loop removes leaves
        # from `neighbours`.
        for leaf in [rank for rank, near in neighbours.items() if len(near) == 1]:
            neighbours[neighbours.pop(leaf).pop()].discard(leaf)
    return sorted(neighbours)


def _levels(size: int, edges: list[Edge], root: int) -> Tree:
    neighbours = _neighbours(size, edges)
    levels, level, visited = [], [root], {root}
    while len(visited) < size:
        step = tuple(
            (rank, neighbour) for rank in level for neighbour in sorted(neighbours[rank] - visited)
        )
        level = [child for _, child in step]
        visited.update(level)
        levels.append(step)
    return tuple(levels)
