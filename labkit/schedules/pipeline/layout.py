"""From the order in which each rank computes to the table: ticks, and the messages between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.check import ScheduleError
from labkit.schedules.pipeline.table import Action, Table

Work: TypeAlias = tuple[Action, int, int]  # action, stage, micro-batch


def lay_out(
    name: str,
    order: Callable[[int], Iterable[Work]],
    ranks: int,
    microbatches: int,
    chunks: int = 1,
) -> Table:
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
    # In a tick: all receive, then all compute, then all send.
    rows.sort(key=lambda row: (row[0], row[1], row[2] % ranks))
    tick, _, stage, action, microbatch, peer = (list(column) for column in zip(*rows, strict=True))
    return Table(
        name=name,
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
        tick=np.array(tick, np.int64),
        stage=np.array(stage, np.int64),
        action=np.array(action),
        microbatch=np.array(microbatch, np.int64),
        peer=np.array(peer, np.int64),
    )


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
        if not turn:
            break
        for rank, work in turn:
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


def _with_messages(
    work: Work, tick: int, ranks: int, stages: int
) -> Iterator[tuple[int, int, int, Action, int, int]]:
    """(tick, phase, stage, action, micro-batch, peer) of a computation and its messages."""
    action, stage, microbatch = work
    yield tick, 1, stage, action, microbatch, -1
    if ranks == 1 or action == "backward_weight":
        return
    onward = 1 if action == "forward" else -1
    if 0 <= stage - onward < stages:
        yield tick, 0, stage, "receive", microbatch, stage - onward
    if 0 <= stage + onward < stages:
        yield tick, 2, stage, "send", microbatch, stage + onward
