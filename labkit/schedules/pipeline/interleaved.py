"""Interleaved 1F1B: each rank has several pipeline stages, so that the pipeline fills sooner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.schedule_table import ScheduleTable, filling, pipeline
from labkit.schedules.round import Integers


def _bubble(table: ScheduleTable, forward: float, backward: float, weight: float) -> float:
    # With fewer micro-batches than ranks, a rank also waits before each of its chunks except the
    # first.
    gaps = (table.chunks - 1) * max(0, table.ranks - table.microbatches)
    seconds = filling(table, forward, backward, weight) + gaps * (forward + backward + weight)
    return seconds / table.chunks


def _most_in_flight(table: ScheduleTable, rank: Integers) -> Integers:
    # Each stored activation belongs to one chunk, which has 1/v of the layers of a rank.
    group_size = table.microbatches // _groups(table.ranks, table.microbatches)
    return (table.chunks - 1) * group_size + 2 * (table.ranks - 1 - rank) + 1


@pipeline("interleaved", _bubble, _most_in_flight, chunked=True)
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> ScheduleTable:
    """1F1B over p · v stages: rank r has v chunks a, b, …, which are the stages r, r + p, …

        p = 2, m = 2, v = 2    F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
                               ·   F0a F1a F0b B0b F1b B1b B0a B1a

    Micro-batches move in max(1, floor(m/p)) groups of equal size: a group passes through all chunks
    before the next group starts. A stage has 1/v of a rank's layers, so a tick takes 1/v of the
    time of a tick in `one_forward_one_backward`. The bubble is also divided by v: it is (p - 1)/(v
    m) of the compute time. For m < p micro-batches, the bubble is (p - 1 + (v - 1)(p - m))/(v m).
    The disadvantages are v times as many messages and, if groups have p micro-batches, (p - 1)/(p
    v) more memory at rank 0.

    Args:
        ranks: Number p of ranks.
        microbatches: Number m of micro-batches, a multiple of max(1, floor(m/p)).
        chunks: Number v of stages per rank.

    Raises:
        InvalidInput: If a number is below 1, or if the micro-batches do not form equal groups.

    Source: Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters
    using Megatron-LM*, arXiv 2104.04473. Differs from it: unlike the paper, this schedule allows
    group sizes other than p. PyTorch's `ScheduleInterleaved1F1B` defines the order of computations
    for such groups.
    """
    groups = _groups(ranks, microbatches)
    if microbatches % groups:
        below, above = (
            next(m for m in count(microbatches, step) if m % _groups(ranks, m) == 0)
            for step in (-1, 1)
        )
        raise InvalidInput(
            f"schedule='interleaved' needs equal groups of {ranks} micro-batches (the number of "
            f"ranks) or more, but {microbatches} make {groups} unequal groups; give {below} or "
            f"{above} micro-batches"
        )
    group_size = microbatches // groups
    # Number of forward computations of a rank, which equals the number of its backward
    # computations.
    total = microbatches * chunks

    def work(number: int, rank: int, backward: bool) -> Work:
        group, place = divmod(number, group_size * chunks)
        chunk, member = divmod(place, group_size)
        microbatch = group * group_size + member
        if backward:
            return "backward", (chunks - 1 - chunk) * ranks + rank, microbatch
        return "forward", chunk * ranks + rank, microbatch

    def order(rank: int) -> Iterator[Work]:
        # A micro-batch takes two ticks per following rank: one towards the last rank and one back.
        ahead = min((chunks - 1) * group_size + 2 * (ranks - 1 - rank) + 1, total)
        for number in range(ahead):
            yield work(number, rank, backward=False)
        for number in range(total):
            yield work(number, rank, backward=True)
            if number + ahead < total:
                yield work(number + ahead, rank, backward=False)

    return lay_out("interleaved", order, ranks, microbatches, chunks)


def _groups(ranks: int, microbatches: int) -> int:
    """Return the number of micro-batch groups, which must divide the number of micro-batches."""
    return max(1, microbatches // max(1, ranks))
