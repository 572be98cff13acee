"""GPipe: all micro-batches forward, then all backward."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.table import Table, filling, pipeline


@pipeline("gpipe", filling, lambda table, rank: table.microbatches)
def gpipe(stages: int, microbatches: int) -> Table:
    """Fill, drain, and back: each stage holds the activations of all m micro-batches.

        p = 3, m = 4    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                        ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                        ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    Bubble: (p - 1)/(m + p - 1) of the time.

    Args: stages: p, one a rank; microbatches: m.
    Raises: InvalidInput, for numbers below 1.
    Source: Huang et al. 2019, *GPipe: efficient training of giant neural networks using pipeline
    parallelism*, arXiv 1811.06965. Recomputation is not the schedule's: a stage may do it in its
    backward.
    """

    def order(stage: int) -> Iterator[Work]:
        for microbatch in range(microbatches):
            yield "forward", stage, microbatch
        for microbatch in reversed(range(microbatches)):
            yield "backward", stage, microbatch

    return lay_out("gpipe", order, stages, microbatches)
