"""Interleaved 1F1B: several stages a rank, so that the pipeline fills sooner."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.table import Table, filling, pipeline


@pipeline(
    "interleaved",
    bubble=lambda table, *parts: filling(table, *parts) / table.chunks,
    # Each is 1/v of a rank's layers.
    most=lambda table, rank: (table.chunks - 1) * table.ranks + 2 * (table.ranks - 1 - rank) + 1,
    chunked=True,
)
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Table:
    """1F1B over p · v stages, of which rank r holds the chunks a, b, …: stages r, r + p, …

        p = 2, m = 2, v = 2    F0a F1a F0b F1b ·   B0b ·   B1b B0a B1a
                               ·   F0a F1a F0b B0b F1b B1b B0a B1a

    Micro-batches move in groups of p: a group goes through all chunks before the next one starts.
    A stage is 1/v of a rank's layers, so that a tick is 1/v of `one_forward_one_backward`'s, and
    so is the bubble: (p - 1)/(v m) of the time that computing takes. The price: v times the
    messages, and (p - 1)/(p v) more memory at rank 0.

    Args: ranks: p; microbatches: m, a multiple of p; chunks: v, stages a rank.
    Raises: InvalidInput, for numbers below 1, or an m that p does not divide.
    Source: Narayanan et al. 2021, *Efficient large-scale language model training on GPU clusters
    using Megatron-LM*, arXiv 2104.04473.
    """
    if ranks > 0 and microbatches % ranks:
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        near = f"{below} or {above}" if below > 0 else str(above)
        raise InvalidInput(
            f"interleaved moves micro-batches in groups of {ranks}, one a rank, and {ranks} does "
            f"not divide {microbatches}: give {near} micro-batches"
        )
    # Computations of a rank in each direction.
    total = microbatches * chunks

    def work(number: int, rank: int, backward: bool) -> Work:
        group, place = divmod(number, ranks * chunks)
        chunk, member = divmod(place, ranks)
        microbatch = group * ranks + member
        if backward:
            return "backward", (chunks - 1 - chunk) * ranks + rank, microbatch
        return "forward", chunk * ranks + rank, microbatch

    def order(rank: int) -> Iterator[Work]:
        # Two steps a rank: a micro-batch's way down to the last rank and back.
        ahead = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1, total)
        for number in range(ahead):
            yield work(number, rank, backward=False)
        for number in range(total):
            yield work(number, rank, backward=True)
            if number + ahead < total:
                yield work(number + ahead, rank, backward=False)

    return lay_out("interleaved", order, ranks, microbatches, chunks)
