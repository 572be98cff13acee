"""Zero bubble: delayed weight gradients fill idle gaps, because no other rank waits for them."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.schedule_table import ScheduleTable, pipeline


def _h1_bubble(
    table: ScheduleTable, forward: float, backward: float, weight: float
) -> float | None:
    if table.microbatches < table.ranks or weight > forward:
        return None
    return (table.ranks - 1) * (forward + backward - weight)


@pipeline("zero_bubble", _h1_bubble, lambda table, rank: table.ranks)
def zero_bubble(stages: int, microbatches: int) -> ScheduleTable:
    """ZB-H1: 1F1B with delayed weight gradients; every stage stores at most p micro-batches.

        p = 3, m = 4    F0 F1 F2 ·  ·  B0 W0 F3 B1 W1 B2 W2 B3 W3
                        ·  F0 F1 ·  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                        ·  ·  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    ZB-H1 needs at most as much memory for activations as the first stage of 1F1B. B is the input
    gradient, W the weight gradient. In formulas, F, B and W are times in s. With at least p
    micro-batches, the bubble is (p - 1)(F + B - W). For F = B = W, the bubble of ZB-H1 is a third
    of that of `one_forward_one_backward`.

    Args:
        stages: Number p of stages, one per rank.
        microbatches: Number m of micro-batches.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Qi et al. 2024, *Zero bubble pipeline parallelism*, arXiv 2401.10241.
    Differs from it: only the paper's hand-made schedules are implemented, not its automatic search
    with measured times.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=stages - stage, late=stage)

    return lay_out("zero_bubble", order, stages, microbatches)


def _h2_bubble(
    table: ScheduleTable, forward: float, backward: float, weight: float
) -> float | None:
    if table.microbatches < 2 * table.ranks - 1 or weight > min(forward, backward):
        return None
    return (table.ranks - 1) * (forward + backward - 2 * weight)


@pipeline("zero_bubble_h2", _h2_bubble, lambda table, rank: 2 * table.ranks - 1)
def zero_bubble_h2(stages: int, microbatches: int) -> ScheduleTable:
    """ZB-H2: more forwards at the start, so no rank waits; each stage stores 2p - 1 micro-batches.

        p = 3, m = 5    F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
                        ·  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

    With at least 2p - 1 micro-batches, the bubble between a rank's first row and its last is
    (p - 1)(F + B - 2W). Ranks start and end at different times. The next batch starts without a gap
    only if each rank updates its weights without waiting for other ranks.

    Args, raises and source: as `zero_bubble`.
    Differs from it: the optimizer step is not undone if a later check of all gradients (of their
    norm or for overflow) fails. Ranks wait for this check before the optimizer step.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)

    return lay_out("zero_bubble_h2", order, stages, microbatches)


def _order(stage: int, microbatches: int, ahead: int, late: int) -> Iterator[Work]:
    """Yield `ahead` forwards first; delay each weight gradient by `late` micro-batches."""
    ahead = min(ahead, microbatches)
    for microbatch in range(ahead):
        yield "forward", stage, microbatch
    for microbatch in range(microbatches):
        yield "backward_input", stage, microbatch
        # Weight gradients are delayed, so that they fill ticks in which the stage would be idle.
        if microbatch >= late:
            yield "backward_weight", stage, microbatch - late
        if microbatch + ahead < microbatches:
            yield "forward", stage, microbatch + ahead
    for microbatch in range(max(microbatches - late, 0), microbatches):
        yield "backward_weight", stage, microbatch
