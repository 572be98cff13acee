"""Partitions of layers into stages, and the memory that each stage needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline_table import ScheduleTable
from labkit.schedules.round import Booleans, Integers


def explicit_partition(blocks: Sequence[int], available: int) -> list[int]:
    """Return the edges of stages with the given numbers of blocks; stage k begins at edges[k].

    explicit_partition([2, 1, 3], 6) = [0, 2, 3, 6]

    Raises:
        InvalidInput: If a stage has no block. The numbers of blocks must add up to `available`.
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
    """Return the stage edges that minimize the parameter count of the largest stage."""
    return balance_costs([float(count) for count in parameters], stages)


def balance_costs(costs: Sequence[float], stages: int) -> list[int]:
    """Return the edges of contiguous stages that minimize the cost of the most expensive stage.

        costs 4 1 1 4 · 2 stages  ->  [0, 2, 4]: 5 and 5
        costs 1 1 8 · 2 stages    ->  [0, 2, 3]: 2 and 8

    Each stage has at least one block. Several partitions may have the same maximum cost. The
    function then chooses the partition with the smallest sum of squared costs. A small sum of
    squared costs also balances the costs of the cheaper stages. If the sums of squared costs are
    also equal, the function chooses the first partition in lexicographic order.

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
    # An entry of `best` is a triple: maximum stage cost, sum of squared costs, edges. The entry
    # `best[k][b]` is the best division of the first b blocks into k stages.
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


def in_flight(table: ScheduleTable) -> Integers:
    """Return the maximum number of activations that each rank stores at a time, shape (ranks,).

    One activation belongs to one micro-batch in one stage. A stage stores an activation from its
    forward pass on. The stage frees the activation after the input gradient and the weight
    gradient. Each chunk (stage) of a rank has 1/chunks of the rank's layers.
    """
    change = (table.action == "forward").astype(np.int64) - _backward_ends(table)
    maximum = [change[table.rank == rank].cumsum().max(initial=0) for rank in range(table.ranks)]
    return np.array(maximum, np.int64)


def versions(table: ScheduleTable) -> Integers:
    """Return how many weight updates precede each micro-batch on each stage.

    The result is 0 everywhere if all stages update their weights together at the end.
    """
    result = np.zeros((table.stages, table.microbatches), np.int64)
    if not table.asynchronous:
        return result
    for stage in range(table.stages):
        of_stage = table.take(table.stage == stage)
        forward = of_stage.action == "forward"
        result[stage, of_stage.microbatch[forward]] = _backward_ends(of_stage).cumsum()[forward]
    return result


def stored_versions(table: ScheduleTable) -> Integers:
    """Return the maximum number of weight versions that each stage stores, shape (stages,).

    The count includes the newest version; older versions are stored for pending backward passes.
    """
    version = versions(table)
    maximum = np.ones(table.stages, np.int64)
    for stage in range(table.stages):
        of_stage = table.take(table.stage == stage)
        newest, needed = 0, set()
        for action, microbatch in zip(of_stage.action, of_stage.microbatch, strict=True):
            if action == "forward":
                needed.add(int(microbatch))
            elif action in ("backward", "backward_weight"):
                needed.discard(int(microbatch))
                newest += table.asynchronous
            # A set counts a weight version once, even if several micro-batches use it.
            stored = {int(version[stage, number]) for number in needed} | {newest}
            maximum[stage] = max(maximum[stage], len(stored))
    return maximum


class Tick(NamedTuple):
    """The work and the messages of one tick, and the activations that stages store after it.

    Attributes:
        work: For each stage that computes, its action and its micro-batch.
        sent: Messages as (source stage, destination stage, micro-batch), including those between
            stages of one rank.
        held: For each stage, the micro-batches whose activations the stage stores for their
            backward passes.
    """

    work: dict[int, tuple[str, int]]
    sent: list[tuple[int, int, int]]
    held: list[tuple[int, ...]]


def ticks(table: ScheduleTable) -> list[Tick]:
    """Return the ticks of a schedule in order."""
    # In a schedule table, computations have the peer -1. Messages have a stage as peer.
    rows = [row for row in table.rows() if row[4] < 0]
    stored: list[set[int]] = [set() for _ in range(table.stages)]
    result = []
    for tick in range(int(table.tick.max(initial=-1)) + 1):
        work: dict[int, tuple[str, int]] = {}
        sent = []
        for _, stage, action, number, _ in (row for row in rows if row[0] == tick):
            work[stage] = (action, number)
            if action == "forward":
                stored[stage].add(number)
            # After the action `backward_input`, the stage still needs the activation for the weight
            # gradient.
            elif action != "backward_input":
                stored[stage].discard(number)
            # An input gradient goes to the previous stage; a weight gradient stays on its stage.
            onward = stage + {"forward": 1, "backward_weight": 0}.get(action, -1)
            if onward != stage and 0 <= onward < table.stages:
                sent.append((stage, onward, number))
        result.append(Tick(work, sent, [tuple(sorted(numbers)) for numbers in stored]))
    return result


def _backward_ends(table: ScheduleTable) -> Booleans:
    """Return a mask of the rows that complete a micro-batch's backward pass on a stage."""
    return np.isin(table.action, ("backward", "backward_weight"))
