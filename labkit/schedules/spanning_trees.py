"""Allreduce over spanning trees, packed so that unequal links are used to the full (Blink)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput
from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import by_parts, by_parts_cost, two_rounds_of_parts
from labkit.schedules.round import Round, beside

Links: TypeAlias = Mapping[tuple[int, int], float]
Edge: TypeAlias = tuple[int, int]  # (parent, child)
Tree: TypeAlias = tuple[tuple[Edge, ...], ...]  # the edges of each level, the root's first


# The formulas are those of equal links, where the trees are p stars.
@collective(everywhere(SUM), by_parts, by_parts_cost, two_rounds_of_parts, layout="links")
def spanning_trees(size: int, links: Links | None = None, pieces: int = 1) -> Iterator[Round]:
    r"""Each tree carries a share of the buffer: the sum goes up to its root, then down again.

        links 0 === 1        tree A 0 --- 1        tree B 0 --- 1        0 = 1 is twice as
               \   /                 \                       /          fast: both trees use
                 2                     2                   2            it, half a buffer each

    Equal links between all pairs give the p stars, each with 1/p of the buffer.

    Args: size: number of ranks, from 1; links: (source, destination) -> bandwidth, in any unit;
    a tree uses a pair of ranks in both directions, the slower counts; pieces: parts into which
    each share is cut so that levels of a tree work at the same time.
    Raises: InvalidInput, where the links do not join all ranks.
    Source: Wang et al. 2019, *Blink* (arXiv 1910.04940). Blink packs by multiplicative weights
    and thins the trees by an integer program; here `pack` takes the trees one by one.
    """
    if pieces < 1:
        raise InvalidInput(f"pieces={pieces}: a share is cut into 1 piece or more")
    if size == 1:
        return
    trees = {_star(size, rank): 1 for rank in range(size)} if links is None else pack(size, links)
    streams = []
    start = 0
    for tree, weight in trees.items():
        for piece in range(pieces):
            # Each piece starts a round later than the one before: they follow each other through
            # the levels.
            streams.append(chain(repeat(None, piece), _up_and_down(tree, start, weight)))
            start += weight
    for each in beside(streams):
        # Around the circle, as in `circle`: trees with different roots do not meet at a link.
        yield each.take(np.argsort((each.destination - each.source) % size, kind="stable"))


def pack(size: int, links: Links, shares: int | None = None) -> dict[Tree, int]:
    """Spanning trees and their whole-numbered weights that fill the links evenly.

    Greedy tree packing: each share takes the minimum spanning tree for the cost
    (load + 1) / bandwidth of a link, which is the tree whose fullest link is least full. The
    weights tend to the best fractional packing as shares grow.

    Args: shares: number of trees taken, equal ones counted together; default 4 · size.
    Source: Young 1995, *Randomized rounding without solving the linear program*; Thorup 2007,
    *Fully-dynamic min-cut*.
    """
    bandwidth = _symmetric(size, links)
    load = np.zeros((size, size))
    taken: Counter[Tree] = Counter()
    roots: Counter[int] = Counter()
    for _ in range(4 * size if shares is None else shares):
        with np.errstate(divide="ignore"):
            edges = _minimum_tree((load + 1) / bandwidth)
        for one, other in edges:
            # Both ways: the sum goes up the tree, and comes down it again.
            load[[one, other], [other, one]] += 1
        # In the middle, so that a tree is shallow; of two middles the one that is root less often.
        root = min(_centres(size, edges), key=lambda rank: roots[rank])
        roots[root] += 1
        taken[_levels(size, edges, root)] += 1
    # Shares are whole numbers of chunks: the fewer, the less is divided.
    common = math.gcd(*taken.values())
    return {tree: weight // common for tree, weight in taken.items()}


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
                f"link ({source}, {destination}) of bandwidth {value} among {size} ranks: give "
                f"ranks from 0 to {size - 1} and a bandwidth above 0"
            )
        bandwidth[source, destination] = value
    return np.minimum(bandwidth, bandwidth.T)


def _minimum_tree(cost: NDArray[np.float64]) -> list[Edge]:
    """Prim's algorithm; among equals the rank that joined first, which keeps trees shallow."""
    near, nearest = cost[0].copy(), np.zeros(len(cost), np.int64)
    outside = np.arange(len(cost)) > 0
    edges = []
    while outside.any():
        rank = int(np.argmin(np.where(outside, near, np.inf)))
        if not outside[rank] or np.isinf(near[rank]):
            raise InvalidInput(
                f"links do not join rank {int(np.flatnonzero(outside)[0])} to rank 0 in both "
                f"directions: add links until every rank can be reached"
            )
        edges.append((int(nearest[rank]), rank))
        outside[rank] = False
        closer = outside & (cost[rank] < near)
        near[closer], nearest[closer] = cost[rank][closer], rank
    return edges


def _neighbours(size: int, edges: list[Edge]) -> dict[int, set[int]]:
    neighbours: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for one, other in edges:
        neighbours[one].add(other)
        neighbours[other].add(one)
    return neighbours


def _centres(size: int, edges: list[Edge]) -> list[int]:
    """The one or two ranks in the middle of a tree: peel off leaves until no more remain."""
    left = _neighbours(size, edges)
    while len(left) > 2:
        # A list, for the tree changes while its leaves go.
        for leaf in [rank for rank, near in left.items() if len(near) == 1]:
            left[left.pop(leaf).pop()].discard(leaf)
    return sorted(left)


def _levels(size: int, edges: list[Edge], root: int) -> Tree:
    neighbours = _neighbours(size, edges)
    levels, level, seen = [], [root], {root}
    while len(seen) < size:
        step = tuple((rank, near) for rank in level for near in sorted(neighbours[rank] - seen))
        level = [child for _, child in step]
        seen.update(level)
        levels.append(step)
    return tuple(levels)
