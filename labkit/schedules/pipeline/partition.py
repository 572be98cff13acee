"""Where to cut a chain of blocks: pure arithmetic on what each block costs."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.common.errors import InvalidInput


def by_hand(blocks: Sequence[int], available: int) -> list[int]:
    """The edges of stages of so many blocks each.

    by_hand([2, 1, 3], 6) = [0, 2, 3, 6]

    Raises:
        InvalidInput: a stage without blocks, or not all blocks given out.
    """
    if min(blocks, default=0) < 1 or sum(blocks) != available:
        raise InvalidInput(
            f"partition={list(blocks)}: give each stage one block or more, {available} in all"
        )
    edges = [0]
    for count in blocks:
        edges.append(edges[-1] + count)
    return edges


def by_parameters(parameters: Sequence[int], stages: int) -> list[int]:
    """Edges that make the stage with most parameters as small as can be."""
    return cheapest([float(count) for count in parameters], stages)


def cheapest(costs: Sequence[float], stages: int) -> list[int]:
    """Edges of contiguous stages whose most expensive one is as cheap as can be.

        costs 4 1 1 4 · 2 stages  ->  [0, 2, 4]: 5 and 5
        costs 1 1 8 · 2 stages    ->  [0, 2, 3]: 2 and 8

    Each stage has one block at least. Of equally good cuts the first ones in order: the sum of
    squares decides, so that what cannot be balanced is at least spread.

    Args:
        costs: of each block, seconds or parameters.
        stages: 1 to the number of blocks.

    Raises:
        InvalidInput: more stages than blocks.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise InvalidInput(
            f"{stages} stages of {blocks} blocks: a stage holds one block at least; allowed are "
            f"1 to {blocks} stages"
        )
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[k][b]: (greatest stage, sum of squares, edges) of the first b blocks in k stages
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
