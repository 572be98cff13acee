"""A schedule with delayed gradients: each module runs its backward with an older batch."""

from __future__ import annotations

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.layout import as_table
from labkit.schedules.pipeline.schedule_table import Action, ScheduleTable


def delayed(modules: int, iterations: int) -> ScheduleTable:
    """In each iteration, a module runs forward with a new batch, then backward with an older batch.

        K = 3, 4 iterations    F0 ·  F1 ·  F2 B0 F3 B1
                               ·  F0 ·  F1 B0 F2 B1 F3 B2
                               ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

    In iteration t, module k of K (from 0) runs backward with batch t - (K - 1 - k). The micro-batch
    numbers of the table are iteration numbers. A message is omitted if it would arrive after the
    last iteration, so some modules run no backward for the last batches.

    Args:
        modules: Number K of modules, one per rank.
        iterations: Number of iterations.

    Raises:
        InvalidInput: If a number is below 1.

    Source: Huo et al. 2018, arXiv 1804.10574.
    """
    if min(modules, iterations) < 1:
        raise InvalidInput(
            f"{modules} modules and {iterations} iterations are too few; give one or more of each"
        )
    rows = [
        (2 * iteration + module + place, phase, module, action, number, peer)
        for iteration in range(iterations)
        for module in range(modules)
        for place, phase, action, number, peer in _iteration(modules, iterations, iteration, module)
    ]
    return as_table("delayed gradients", rows, modules, iterations)


def _iteration(
    modules: int, iterations: int, iteration: int, module: int
) -> list[tuple[int, int, Action, int, int]]:
    """Return (tick offset, phase in the tick, action, batch, peer) for each action of a module."""
    backward_batch = iteration - (modules - 1 - module)
    first, last = module == 0, module == modules - 1
    rows: list[tuple[int, int, Action, int, int]] = [(0, 1, "forward", iteration, -1)]
    if not first:
        rows.insert(0, (0, 0, "receive", iteration, module - 1))
    if not last:
        rows.append((0, 2, "send", iteration, module + 1))
    if backward_batch < 0:
        return rows
    if not last:
        rows.append((1, 0, "receive", backward_batch, module + 1))
    rows.append((1, 1, "backward", backward_batch, -1))
    if not first and iteration + 1 < iterations:
        rows.append((1, 2, "send", backward_batch, module - 1))
    return rows
