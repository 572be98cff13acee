"""Partition of a chain of blocks into stages, computed from the cost of each block."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.common.errors import InvalidInput


def explicit_partition(blocks: Sequence[int], available: int) -> list[int]:
    """Return the edges of stages with the given numbers of blocks; stage k begins at edges[k].

    explicit_partition([2, 1, 3], 6) = [0, 2, 3, 6]

    Raises:
        InvalidInput: If a stage has no block, or if the numbers of blocks do not add up to
            `available`.
    """
    if min(blocks, default=0) < 1 or sum(blocks) != available:
        raise InvalidInput(
            f"partition={list(blocks)} is invalid; give each stage one block or more, "
            f"{available} in total"
        )
    edges = [0]
    for count in blocks:
        edges.append(edges[-1] + count)
    return edges


def balance_parameters(parameters: Sequence[int], stages: int) -> list[int]:
    """Return the stage edges for which the largest stage has the fewest parameters."""
    return balance_costs([float(count) for count in parameters], stages)


def balance_costs(costs: Sequence[float], stages: int) -> list[int]:
    """Return the edges of contiguous stages for which the most expensive stage costs least.

        costs 4 1 1 4 · 2 stages  ->  [0, 2, 4]: 5 and 5
        costs 1 1 8 · 2 stages    ->  [0, 2, 3]: 2 and 8

    Each stage has at least one block. Among partitions with the same maximum cost, the function
    chooses the one with the smallest sum of squared costs. This rule also balances the stages below
    the maximum. Among partitions that are still equal, the function chooses the first in
    lexicographic order.

    Args:
        costs: Cost of each block, in seconds or parameters.
        stages: Number of stages, from 1 to the number of blocks.

    Raises:
        InvalidInput: If there are more stages than blocks.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise InvalidInput(
            f"{stages} stages of {blocks} blocks: each stage needs at least one block; allowed: "
            f"1 to {blocks} stages"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[k][b] is (maximum cost, sum of squares, edges) for the first b blocks in k stages.
    best: list[dict[int, tuple[float, float, list[int]]]] = [{0: (0.0, 0.0, [0])}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, list[int]]] = {}
        for stop in range(stage, blocks - (stages - stage) + 1):
            row[stop] = min(
                (
                    max(greatest, before[stop] - before[start]),
                    squares + (before[stop] - before[start]) ** 2,
                    [*edges, stop],
                )
                for start, (greatest, squares, edges) in best[-1].items()
                if start < stop
            )
        best.append(row)
    return best[-1][blocks][2]
