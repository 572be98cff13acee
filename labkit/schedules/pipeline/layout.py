"""From the order in which each rank computes to the table: ticks, and the messages between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.interpreter import ScheduleError
from labkit.schedules.pipeline.table import Action, Table

Work: TypeAlias = tuple[Action, int, int]  # action, stage, micro-batch
Row: TypeAlias = tuple[int, int, int, Action, int, int]  # tick, phase, stage, action, number, peer


Order: TypeAlias = Callable[[int], Iterable[Work]]


def lay_out(name: str, order: Order, ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of a schedule: each computation in the earliest tick that its needs allow.

    Args: order: rank -> what it computes, in this order; ranks, microbatches, chunks: from 1.
    Raises: InvalidInput, for numbers below 1; ScheduleError, where the orders wait for each other.
    """
    if min(ranks, microbatches, chunks) < 1:
        raise InvalidInput(
            f"{name} of {ranks} stages, {microbatches} micro-batches and {chunks} chunks: give one "
            f"or more of each"
        )
    orders = [list(order(rank)) for rank in range(ranks)]
    rows = [
        row
        for work, tick in _earliest(name, orders, ranks * chunks).items()
        for row in _with_messages(work, tick, ranks, ranks * chunks)
    ]
    return as_table(name, rows, ranks, microbatches, chunks)


def as_table(name: str, rows: list[Row], ranks: int, microbatches: int, chunks: int = 1) -> Table:
    """The table of these rows, in any order: (tick, phase, stage, action, micro-batch, peer)."""
    # In a tick: all receive, then all compute, then all send.
    rows.sort(key=lambda row: (row[0], row[1], row[2] % ranks))
    tick, _, stage, action, microbatch, peer = map(np.array, zip(*rows, strict=True))
    return Table(name, ranks, chunks, microbatches, tick, stage, action, microbatch, peer)


def _earliest(name: str, orders: list[list[Work]], stages: int) -> dict[Work, int]:
    """The tick of each computation."""
    done: dict[Work, int] = {}
    places = [0] * len(orders)
    for tick in count():
        turn = [
            (rank, order[places[rank]])
            for rank, order in enumerate(orders)
            if places[rank] < len(order)
            and all(need in done for need in _needs(order[places[rank]], stages))
        ]
        # All are done, or wait for each other; `stuck` tells which.
        if not turn:
            break
        for rank, work in turn:
            # After all have looked: what is computed in a tick is of use in the next one.
            done[work] = tick
            places[rank] += 1
    stuck = [
        order[place] for place, order in zip(places, orders, strict=True) if place < len(order)
    ]
    if stuck:
        raise ScheduleError(f"{name}: nobody can go on; next would be {stuck}")
    return done


def _needs(work: Work, stages: int) -> Iterator[Work]:
    """What has to be computed before."""
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
    """The rows of a computation and of its messages."""
    action, stage, microbatch = work
    yield tick, 1, stage, action, microbatch, -1
    # A weight part stays with its stage.
    if ranks == 1 or action == "backward_weight":
        return
    onward = 1 if action == "forward" else -1
    if 0 <= stage - onward < stages:
        yield tick, 0, stage, "receive", microbatch, stage - onward
    if 0 <= stage + onward < stages:
        yield tick, 2, stage, "send", microbatch, stage + onward
