"""Conversion of the order of computations of each rank into a table of ticks and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline.schedule_table import Action, ScheduleTable

Work: TypeAlias = tuple[Action, int, int]  # action, stage, micro-batch
# Tick, phase, stage, action, micro-batch, peer.
Row: TypeAlias = tuple[int, int, int, Action, int, int]


Order: TypeAlias = Callable[[int], Iterable[Work]]


def lay_out(
    name: str, order: Order, ranks: int, microbatches: int, chunks: int = 1
) -> ScheduleTable:
    """Return the table of a schedule, with each computation in its earliest possible tick.

    Args:
        name: Name of the schedule.
        order: Function from a rank to its computations, in order.
        ranks, microbatches: Numbers of ranks and of micro-batches, at least 1.
        chunks: Number of stages per rank, at least 1.

    Raises:
        InvalidInput: If a number is below 1.
        ScheduleError: If the orders cause a deadlock.
    """
    if min(ranks, microbatches, chunks) < 1:
        raise InvalidInput(
            f"{name} has {ranks} stages, {microbatches} micro-batches and {chunks} chunks; give "
            f"one or more of each"
        )
    orders = [list(order(rank)) for rank in range(ranks)]
    rows = [
        row
        for work, tick in _earliest(name, orders, ranks * chunks).items()
        for row in _with_messages(work, tick, ranks, ranks * chunks)
    ]
    return as_table(name, rows, ranks, microbatches, chunks)


def as_table(
    name: str, rows: list[Row], ranks: int, microbatches: int, chunks: int = 1
) -> ScheduleTable:
    """Return a table from unsorted rows (tick, phase, stage, action, micro-batch, peer)."""
    # In each tick, all ranks first receive, then compute, then send.
    rows.sort(key=lambda row: (row[0], row[1], row[2] % ranks))
    tick, _, stage, action, microbatch, peer = map(np.array, zip(*rows, strict=True))
    return ScheduleTable(name, ranks, chunks, microbatches, tick, stage, action, microbatch, peer)


def _earliest(name: str, orders: list[list[Work]], stages: int) -> dict[Work, int]:
    """Return the earliest tick of each computation."""
    done: dict[Work, int] = {}
    positions = [0] * len(orders)
    for tick in count():
        runnable = [
            (rank, order[positions[rank]])
            for rank, order in enumerate(orders)
            if positions[rank] < len(order)
            and all(need in done for need in _needs(order[positions[rank]], stages))
        ]
        # If no rank can run, either all ranks are done, or the ranks in `stuck` are in a deadlock.
        if not runnable:
            break
        for rank, work in runnable:
            # A result is available only in the next tick, so `done` is updated after the search for
            # runnable work.
            done[work] = tick
            positions[rank] += 1
    stuck = [
        order[place] for place, order in zip(positions, orders, strict=True) if place < len(order)
    ]
    if stuck:
        raise ScheduleError(f"{name}: deadlock: no rank can run its next computation: {stuck}")
    return done


def _needs(work: Work, stages: int) -> Iterator[Work]:
    """Yield the computations that must end before this computation starts."""
    action, stage, microbatch = work
    if action == "forward":
        if stage > 0:
            yield "forward", stage - 1, microbatch
    elif action == "backward_weight":
        yield "backward_input", stage, microbatch
    else:
        yield "forward", stage, microbatch
        if stage < stages - 1:
            yield action, stage + 1, microbatch


def _with_messages(work: Work, tick: int, ranks: int, stages: int) -> Iterator[Row]:
    """Yield the table row of a computation and the rows of its messages."""
    action, stage, microbatch = work
    yield tick, 1, stage, action, microbatch, -1
    # A weight gradient stays on its stage, so it needs no message.
    if ranks == 1 or action == "backward_weight":
        return
    onward = 1 if action == "forward" else -1
    if 0 <= stage - onward < stages:
        yield tick, 0, stage, "receive", microbatch, stage - onward
    if 0 <= stage + onward < stages:
        yield tick, 2, stage, "send", microbatch, stage + onward
