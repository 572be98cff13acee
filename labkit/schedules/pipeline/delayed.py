"""Delayed gradients as a table: forward in sequence, each module backward as late as it must be."""

from __future__ import annotations

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline.layout import as_table
from labkit.schedules.pipeline.table import Action, Table


def delayed(modules: int, iterations: int) -> Table:
    """In each iteration a module goes forward with its batch, and backward with an earlier one.

        K = 3, 4 iterations    F0 ·  F1 ·  F2 B0 F3 B1
                               ·  F0 ·  F1 B0 F2 B1 F3 B2
                               ·  ·  F0 B0 F1 B1 F2 B2 F3 B3

    In iteration t module k of K (from 0) goes backward with batch t - (K - 1 - k). The numbers of
    the table's micro-batches are those of the iterations. What would be received after the last
    iteration is not sent, so that the last batches are without some of their backwards.

    Args: modules: K, one a rank; iterations: t.
    Raises: InvalidInput, for numbers below 1.
    Source: Huo et al. 2018, arXiv 1804.10574.
    """
    if min(modules, iterations) < 1:
        raise InvalidInput(
            f"{modules} modules and {iterations} iterations: give one or more of each"
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
    """(tick after the first, phase in it, action, batch, peer) of a module."""
    late = iteration - (modules - 1 - module)
    first, last = module == 0, module == modules - 1
    found: list[tuple[int, int, Action, int, int]] = [(0, 1, "forward", iteration, -1)]
    if not first:
        found.insert(0, (0, 0, "receive", iteration, module - 1))
    if not last:
        found.append((0, 2, "send", iteration, module + 1))
    if late < 0:
        return found
    if not last:
        found.append((1, 0, "receive", late, module + 1))
    found.append((1, 1, "backward", late, -1))
    if not first and iteration + 1 < iterations:
        found.append((1, 2, "send", late, module - 1))
    return found
