"""The wavefront of a recurrent model: layers on ranks, time steps in the place of micro-batches."""

from __future__ import annotations

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.schedules.pipeline.gpipe import gpipe
from labkit.schedules.pipeline.table import Table, filling, pipeline


@pipeline("wavefront", filling, lambda table, rank: table.microbatches, recurrent=True)
def wavefront(layers: int, steps: int) -> Table:
    """While the second layer works on the first value, the first layer handles the second value.

        3 layers, 4 steps    F0 F1 F2 F3 ·  ·  ·  ·  B3 B2 B1 B0
                             ·  F0 F1 F2 F3 ·  ·  B3 B2 B1 B0
                             ·  ·  F0 F1 F2 F3 B3 B2 B1 B0

    Layer l at step t needs layer l - 1 at t and itself at t - 1: cells on a diagonal are free to
    run together. These are the rows of `gpipe`, whose backward runs from the last step to the
    first, as backpropagation through time must; an order such as 1F1B's could not do it.

    Args: layers: p, one a rank (a layer may be several); steps: of time, or stretches of them.
    Raises: InvalidInput, for numbers below 1.
    Source: Appleyard, Kocisky and Blunsom 2016, *Optimizing performance of recurrent neural
    networks on GPUs*, arXiv 1604.01946. Differs from it: layers on ranks, not on streams of a GPU.
    """
    return gpipe(layers, steps)


def stretches(steps: int, count: int) -> list[int]:
    """The edges of stretches of time, of equal length up to one step: 8 in 3 -> [0, 2, 5, 8].

    Raises: InvalidInput, for more stretches than steps.
    """
    if count > steps:
        raise InvalidInput(
            f"microbatches={count} stretches of {steps} time steps: a stretch has one step at "
            f"least; allowed: 1 to {steps}"
        )
    return cut(steps, [1.0] * count)
