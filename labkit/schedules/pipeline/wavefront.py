"""The wavefront schedule of a recurrent model: layers on ranks, time steps as micro-batches."""

from __future__ import annotations

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.schedules.pipeline.gpipe import gpipe
from labkit.schedules.pipeline.schedule_table import ScheduleTable, filling, pipeline


@pipeline("wavefront", filling, lambda table, rank: table.microbatches, recurrent=True)
def wavefront(layers: int, steps: int) -> ScheduleTable:
    """Layer l processes time step t while layer l + 1 processes time step t - 1.

        3 layers, 4 steps    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                             ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                             ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    Layer l at step t needs layer l - 1 at step t and its own state at step t - 1. Therefore all
    pairs of layer and time step on a diagonal can be computed at the same time. The table equals
    that of `gpipe`. Backpropagation through time runs from the last step to the first, which
    excludes orders such as 1F1B.

    Args:
        layers: Number p of stages, one per rank (each may contain several layers).
        steps: Number of time steps, or of segments of the sequence with several time steps each.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Appleyard, Kocisky and Blunsom 2016, *Optimizing performance of recurrent neural
    networks on GPUs*, arXiv 1604.01946. Differs from it: layers run on ranks, whereas the paper
    runs them in GPU streams.
    """
    return gpipe(layers, steps)


def time_segments(steps: int, count: int) -> list[int]:
    """Return the edges of `count` segments of a sequence; segment lengths differ by at most one.

    time_segments(8, 3) = [0, 2, 5, 8]

    Raises:
        InvalidInput: If there are more segments than time steps.
    """
    if count > steps:
        raise InvalidInput(
            f"microbatches={count} exceeds the {steps} time steps, of which each segment needs at "
            f"least one; allowed: 1 to {steps}"
        )
    return cut(steps, [1.0] * count)
