"""Interleaved 1F1B: several stages a rank, so that the pipeline fills sooner."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.table import Table, filling, pipeline
from labkit.schedules.round import Integers


def _bubble(table: Table, forward: float, backward: float, weight: float) -> float:
    # Fewer micro-batches than ranks leave a gap before each further chunk.
    gaps = (table.chunks - 1) * max(0, table.ranks - table.microbatches)
    seconds = filling(table, forward, backward, weight) + gaps * (forward + backward + weight)
    return seconds / table.chunks


def _most(table: Table, rank: Integers) -> Integers:
    # Each is 1/v of a rank's layers.
    group_size = table.microbatches // _groups(table.ranks, table.microbatches)
    return (table.chunks - 1) * group_size + 2 * (table.ranks - 1 - rank) + 1


@pipeline("interleaved", _bubble, _most, chunked=True)
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B over p · v stages, of which rank r holds the chunks a, b, …: stages r, r + p, …

        p = 2, m = 2, v = 2    F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
                               ·   F0a F1a F0b B0b F1b B1b B0a B1a

    Micro-batches move in max(1, floor(m/p)) groups of equal size: a group goes through all chunks
    before the next one starts. A stage is 1/v of a rank's layers, so that a tick is 1/v of
    `one_forward_one_backward`'s, and so is the bubble: (p - 1)/(v m) of the time that computing
    takes. Of m < p micro-batches it is (p - 1 + (v - 1)(p - m))/(v m). The price: v times the
    messages, and (p - 1)/(p v) more memory at rank 0, where groups are of p.

    Args: ranks: p; microbatches: m, which max(1, floor(m/p)) divides; chunks: v, stages a rank.
    Raises: InvalidInput, for numbers below 1, or micro-batches that make no equal groups.
    Source: Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters
    using Megatron-LM*, arXiv 2104.04473. Differs from it: groups may be of other sizes than p, as
    in PyTorch's `ScheduleInterleaved1F1B`, whose orders these are.
    """
    groups = _groups(ranks, microbatches)
    if microbatches % groups:
        below, above = (
            next(m for m in count(microbatches, step) if m % _groups(ranks, m) == 0)
            for step in (-1, 1)
        )
        raise InvalidInput(
            f"interleaved moves micro-batches in equal groups of {ranks} (the ranks) or more, but "
            f"{microbatches} make {groups} unequal groups: give {below} or {above} micro-batches"
        )
    group_size = microbatches // groups
    # Computations of a rank in each direction.
    total = microbatches * chunks

    def work(number: int, rank: int, backward: bool) -> Work:
        group, place = divmod(number, group_size * chunks)
        chunk, member = divmod(place, group_size)
        microbatch = group * group_size + member
        if backward:
            return "backward", (chunks - 1 - chunk) * ranks + rank, microbatch
        return "forward", chunk * ranks + rank, microbatch

    def order(rank: int) -> Iterator[Work]:
        # Two steps a rank: a micro-batch's way down to the last rank and back.
        ahead = min((chunks - 1) * group_size + 2 * (ranks - 1 - rank) + 1, total)
        for number in range(ahead):
            yield work(number, rank, backward=False)
        for number in range(total):
            yield work(number, rank, backward=True)
            if number + ahead < total:
                yield work(number + ahead, rank, backward=False)

    return lay_out("interleaved", order, ranks, microbatches, chunks)


def _groups(ranks: int, microbatches: int) -> int:
    """Groups in which micro-batches move; their number must divide that of micro-batches."""
    return max(1, microbatches // max(1, ranks))
