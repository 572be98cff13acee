"""Zero bubble: only the input part of a backward is urgent; weight parts fill the gaps."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.schedules.pipeline.layout import Work, lay_out
from labkit.schedules.pipeline.table import Table, pipeline


def _h1_bubble(table: Table, forward: float, backward: float, weight: float) -> float | None:
    if table.microbatches < table.ranks or weight > forward:
        return None
    return (table.ranks - 1) * (forward + backward - weight)


@pipeline("zero_bubble", _h1_bubble, lambda table, rank: table.ranks)
def zero_bubble(stages: int, microbatches: int) -> Table:
    """ZB-H1: 1F1B with late weight parts, at the memory of 1F1B's first stage: p micro-batches.

        p = 3, m = 4    F0 F1 F2 ·  ·  B0 W0 F3 B1 W1 B2 W2 B3 W3
                        ·  F0 F1 ·  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
                        ·  ·  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    B: input part, W: weight part, in seconds F, B, W. Bubble from p micro-batches on:
    (p - 1)(F + B - W), a third of `one_forward_one_backward`'s where all take as long.

    Args: stages: p, one a rank; microbatches: m.
    Raises: InvalidInput, for numbers below 1.
    Source: Qi et al. 2024, *Zero bubble pipeline parallelism*, arXiv 2401.10241.
    Differs from it: the hand-made schedules only, no search for an order by measured times.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=stages - stage, late=stage)

    return lay_out("zero_bubble", order, stages, microbatches)


def _h2_bubble(table: Table, forward: float, backward: float, weight: float) -> float | None:
    if table.microbatches < 2 * table.ranks - 1 or weight > min(forward, backward):
        return None
    return (table.ranks - 1) * (forward + backward - 2 * weight)


@pipeline("zero_bubble_h2", _h2_bubble, lambda table, rank: 2 * table.ranks - 1)
def zero_bubble_h2(stages: int, microbatches: int) -> Table:
    """ZB-H2: more forwards first, until nobody ever waits: 2p - 1 micro-batches at every stage.

        p = 3, m = 5    F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
                        ·  F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
                        ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

    Bubble from 2p - 1 micro-batches on: (p - 1)(F + B - 2W), between a rank's first row and its
    last. Ranks start and end at different times: with the next batch they go on like this only if
    no rank waits for the others to change its weights.

    Args, raises and source: as `zero_bubble`.
    Differs from it: the optimizer step is not rolled back where a global check of the gradients
    (of their norm, of overflow) fails afterwards; such a check makes the ranks wait.
    """

    def order(stage: int) -> Iterator[Work]:
        return _order(stage, microbatches, ahead=2 * (stages - stage) - 1, late=2 * stage)

    return lay_out("zero_bubble_h2", order, stages, microbatches)


def _order(stage: int, microbatches: int, ahead: int, late: int) -> Iterator[Work]:
    """`ahead` forwards first; a weight part `late` micro-batches behind its input part."""
    ahead = min(ahead, microbatches)
    for microbatch in range(ahead):
        yield "forward", stage, microbatch
    for microbatch in range(microbatches):
        yield "backward_input", stage, microbatch
        # A weight part waits until the gap that it fills has come.
        if microbatch >= late:
            yield "backward_weight", stage, microbatch - late
        if microbatch + ahead < microbatches:
            yield "forward", stage, microbatch + ahead
    for microbatch in range(max(microbatches - late, 0), microbatches):
        yield "backward_weight", stage, microbatch
