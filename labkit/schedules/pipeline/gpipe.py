"""GPipe: all micro-batches run forward, then all run backward."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.schedule_table import ScheduleTable, filling, pipeline


@pipeline("gpipe", filling, lambda table, rank: table.microbatches)
def gpipe(stages: int, microbatches: int) -> ScheduleTable:
    """All forwards, then all backwards: each stage stores the activations of all m micro-batches.

        p = 3, m = 4    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                        ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                        ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    With p stages and m micro-batches, the bubble is (p - 1)/(m + p - 1) of the time.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Huang et al. 2019, *GPipe: efficient training of giant neural networks using pipeline
    parallelism*, arXiv 1811.06965. Differs from it: the schedule has no entries for recomputation,
    but a stage may recompute activations during its backward.
    """

    def order(stage: int) -> Iterator[Work]:
        for microbatch in range(microbatches):
            yield "forward", stage, microbatch
        for microbatch in reversed(range(microbatches)):
            yield "backward", stage, microbatch

    return lay_out("gpipe", order, stages, microbatches)
