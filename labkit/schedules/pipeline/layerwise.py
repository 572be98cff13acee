"""Layer-wise model parallelism: layers are divided into stages, and one stage works at a time."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.schedule_table import ScheduleTable, filling, pipeline


@pipeline(
    "layerwise",
    bubble=lambda table, *parts: filling(table, *parts) * table.microbatches,
    most=lambda table, rank: 1,
    scheduling="sequential",
)
def layerwise(stages: int, microbatches: int = 1) -> ScheduleTable:
    """Each micro-batch runs forward and backward through all stages before the next one starts.

        p = 3, m = 2    F0 ·  ·  ·  ·  B0 F1 ·  ·  ·  ·  B1
                        ·  F0 ·  ·  B0 ·  ·  F1 ·  ·  B1
                        ·  ·  F0 B0 ·  ·  ·  ·  F1 B1

    Each rank works 1/p of the time, so the only gain from p ranks is their memory. With m = 1
    micro-batch, all other pipeline schedules equal this one.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: the baseline of Huang et al. 2019, arXiv 1811.06965 (its figure 2b).
    """

    def order(stage: int) -> Iterator[Work]:
        for microbatch in range(microbatches):
            yield "forward", stage, microbatch
            yield "backward", stage, microbatch

    return lay_out("layerwise", order, stages, microbatches)
