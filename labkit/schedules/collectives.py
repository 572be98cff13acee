"""Collectives of which an allreduce is made, and what the ranks hold at their end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from labkit.schedules.gather import gather
from labkit.schedules.ring import allgather_ring, reduce_scatter_ring
from labkit.schedules.round import Integers, Schedule
from labkit.schedules.scatter import scatter
from labkit.schedules.tree import broadcast_tree, reduce_tree

SUM = -1  # the sum of the chunk over all ranks
ANY = -2  # whatever: the collective promises nothing here


@dataclass(frozen=True)
class Collective:
    """A schedule and its promise.

    Args: schedule: size -> rounds; ends: (size, chunks) -> table of shape (size, chunks) that
    says what each rank holds in each chunk at the end: `SUM`, `ANY`, or the rank r ≥ 0 whose
    chunk it was at the start.
    """

    schedule: Schedule
    ends: Callable[[int, int], Integers]

    def _repr_html_(self) -> str:
        from labkit.schedules.display import collective_html

        return collective_html(self)


def _all(value: int) -> Callable[[int, int], Integers]:
    return lambda size, chunks: np.full((size, chunks), value)


def _sum_at_root(size: int, chunks: int) -> Integers:
    table = np.full((size, chunks), ANY)
    table[0] = SUM
    return table


def _sum_at_home(size: int, chunks: int) -> Integers:
    return np.where(np.eye(size, chunks, dtype=np.bool_), SUM, ANY)


def _chunks_of_all(size: int, chunks: int) -> Integers:
    return np.tile(np.arange(chunks), (size, 1))


def _chunks_of_all_at_root(size: int, chunks: int) -> Integers:
    table = np.full((size, chunks), ANY)
    table[0] = np.arange(chunks)
    return table


def _roots_chunk_at_home(size: int, chunks: int) -> Integers:
    return np.where(np.eye(size, chunks, dtype=np.bool_), 0, ANY)


def allreduce(schedule: Schedule) -> Collective:
    """An allreduce promises the sum, everywhere."""
    return Collective(schedule, _all(SUM))


COLLECTIVES: dict[str, Collective] = {
    "reduce_tree": Collective(reduce_tree, _sum_at_root),
    "broadcast_tree": Collective(broadcast_tree, _all(0)),
    "gather": Collective(gather, _chunks_of_all_at_root),
    "scatter": Collective(scatter, _roots_chunk_at_home),
    "allgather_ring": Collective(allgather_ring, _chunks_of_all),
    "reduce_scatter_ring": Collective(reduce_scatter_ring, _sum_at_home),
}
