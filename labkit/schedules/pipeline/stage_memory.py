"""What a schedule makes a rank hold: activations of micro-batches, versions of weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.schedules.pipeline.table import Table
from labkit.schedules.round import Booleans, Integers


def in_flight(table: Table) -> Integers:
    """The most activations that each rank holds at once, shape (ranks,).

    Counted in micro-batches of one stage: from the forward until the backward is whole (with its
    weight part). A rank with several chunks holds 1/chunks of its layers in each.
    """
    change = (table.action == "forward").astype(np.int64) - _whole(table)
    held = [change[table.rank == rank].cumsum().max(initial=0) for rank in range(table.ranks)]
    return np.array(held, np.int64)


def versions(table: Table) -> Integers:
    """Updates in the weights that a micro-batch meets, shape (stages, microbatches).

    0 throughout where all change their weights together at the end.
    """
    found = np.zeros((table.stages, table.microbatches), np.int64)
    if not table.asynchronous:
        return found
    for stage in range(table.stages):
        own = table.take(table.stage == stage)
        forward = own.action == "forward"
        found[stage, own.microbatch[forward]] = _whole(own).cumsum()[forward]
    return found


def stashed(table: Table) -> Integers:
    """The most versions of its weights that each stage holds at once, shape (stages,).

    The newest is one of them; an older one is kept for the backwards of its micro-batches.
    """
    met = versions(table)
    most = np.ones(table.stages, np.int64)
    for stage in range(table.stages):
        own = table.take(table.stage == stage)
        newest, needed = 0, set()
        for action, microbatch in zip(own.action, own.microbatch, strict=True):
            if action == "forward":
                needed.add(int(microbatch))
            elif action in ("backward", "backward_weight"):
                needed.discard(int(microbatch))
                newest += table.asynchronous
            # A set: several micro-batches may have met the same version.
            kept = {int(met[stage, each]) for each in needed} | {newest}
            most[stage] = max(most[stage], len(kept))
    return most


class Tick(NamedTuple):
    """What happens in one tick, and what stages hold after it.

    work: (action, micro-batch) of the stages that compute; sent: (source, destination,
    micro-batch), also between stages of one rank; held: the micro-batches of each stage whose
    activations wait for their backward.
    """

    work: dict[int, tuple[str, int]]
    sent: list[tuple[int, int, int]]
    held: list[tuple[int, ...]]


def ticks(table: Table) -> list[Tick]:
    """The ticks of a schedule in their order."""
    # Only what computes has no peer.
    rows = [row for row in table.rows() if row[4] < 0]
    held: list[set[int]] = [set() for _ in range(table.stages)]
    found = []
    for tick in range(int(table.tick.max(initial=-1)) + 1):
        work: dict[int, tuple[str, int]] = {}
        sent = []
        for _, stage, action, number, _ in (row for row in rows if row[0] == tick):
            work[stage] = (action, number)
            if action == "forward":
                held[stage].add(number)
            # The weight part still needs the activation.
            elif action != "backward_input":
                held[stage].discard(number)
            # A gradient goes one stage back, and a weight part nowhere.
            onward = stage + {"forward": 1, "backward_weight": 0}.get(action, -1)
            if onward != stage and 0 <= onward < table.stages:
                sent.append((stage, onward, number))
        found.append(Tick(work, sent, [tuple(sorted(each)) for each in held]))
    return found


def _whole(table: Table) -> Booleans:
    """Rows after which a micro-batch's backward is whole."""
    return np.isin(table.action, ("backward", "backward_weight"))
