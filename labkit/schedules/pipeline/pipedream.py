"""PipeDream: 1F1B without draining; each stage updates its weights after each micro-batch."""

from __future__ import annotations

from labkit.schedules.pipeline.one_forward_one_backward import one_forward_one_backward
from labkit.schedules.pipeline.schedule_table import ScheduleTable, pipeline


@pipeline(
    "pipedream",
    bubble=lambda table, *parts: 0.0,
    most=lambda table, rank: table.ranks - rank,
    asynchronous=True,
)
def pipedream(stages: int, microbatches: int) -> ScheduleTable:
    """A stream of m batches in 1F1B order; stage s stores at most p - s versions of its weights.

        p = 3, m = 6    F0 F1 F2 ·  ·  B0 F3 B1 F4 B2 F5 B3 ·  B4 ·  B5
                        ·  F0 F1 ·  B0 F2 B1 F3 B2 F4 B3 F5 B4 ·  B5
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    Batch b runs forward and backward through stage s with the same version of the weights. This
    version contains max(0, b - (p - 1 - s)) updates (`stage_memory.versions`). The last stage uses
    the newest weights; the first stage uses weights that are p - 1 updates old. Once the pipeline
    is full and until it drains, no rank waits, so the steady state has no bubble.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of batches, each followed by an update.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Narayanan et al. 2019, *PipeDream: generalized pipeline parallelism for DNN training*;
    Harlap et al. 2018, arXiv 1806.03377. Differs from it: stages are not replicated, and vertical
    sync (one version for all stages) is omitted, as in the paper's experiments.
    """
    return one_forward_one_backward(stages, microbatches)
