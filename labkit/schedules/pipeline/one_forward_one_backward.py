"""1F1B: each micro-batch runs backward as soon as it can."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.schedule_table import ScheduleTable, filling, pipeline


@pipeline("1f1b", filling, lambda table, rank: table.ranks - rank)
def one_forward_one_backward(stages: int, microbatches: int) -> ScheduleTable:
    """Alternate forward and backward; stage s stores at most p - s micro-batches, for any m.

        p = 3, m = 4    F0 F1 F2 ·  ·  B0 F3 B1 ·  B2 ·  B3
                        ·  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

    The idle time (bubble) equals that of `gpipe`, but less memory is needed.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Narayanan et al. 2021, *Memory-efficient pipeline-parallel DNN training* (PipeDream-
    Flush), arXiv 2006.09503.
    """

    def order(stage: int) -> Iterator[Work]:
        ahead = min(stages - stage, microbatches)
        for microbatch in range(ahead):
            yield "forward", stage, microbatch
        for microbatch in range(microbatches):
            yield "backward", stage, microbatch
            if microbatch + ahead < microbatches:
                yield "forward", stage, microbatch + ahead

    return lay_out("1f1b", order, stages, microbatches)
