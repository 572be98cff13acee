"""Allreduce in the network: switches add incoming values and send the sum back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, uniform_counts
from labkit.schedules.hierarchical import Hosts, host_groups
from labkit.schedules.round import Integers, Round, run_concurrently


def switch_above(size: int, hosts: Hosts | None = None) -> Integers:
    """Return the number of the switch above each rank, then above each switch; -1 for the root.

    Switches are numbered after the ranks. Without hosts, one switch serves all ranks. With hosts,
    each host has a switch, and a root switch connects these switches.

    switch_above(4) = [4, 4, 4, 4, -1]; switch_above(4, hosts=2) = [4, 4, 5, 5, 6, 6, -1]
    """
    groups = [list(range(size))] if hosts is None else host_groups(size, hosts)
    above = np.empty(size + len(groups), np.int64)
    for number, group in enumerate(groups):
        above[group] = size + number
    if len(groups) > 1:
        above = np.append(above, -1)
    above[size:-1], above[-1] = len(above) - 1, -1
    return above


@collective(
    all_ranks_hold(SUM),
    lambda p, chunks=1: uniform_counts(p, chunks * (p > 1), chunks if p > 1 else 1),
    lambda p: AlphaBetaCost(2 * (p > 1), 2 * (p > 1)),
    layout="hosts",
    switches=lambda p, hosts=None, chunks=1: len(switch_above(p, hosts)) - p,
)
def in_network(size: int, hosts: Hosts | None = None, chunks: int = 1) -> Iterator[Round]:
    """Ranks send to switches, which return the sum; the time is 2(α + nβ) per switch level.

        0 ──┐             ┌──► 0
        1 ──┼──► S ═ sum ═┼──► 1      one message of n per rank: half of a ring's volume,
        2 ──┘             └──► 2      and two hops for any number of ranks

    With hosts there are two levels: one switch per host and a root switch. With several chunks,
    ranks send later chunks up while the sums of earlier chunks come back. If the links of all
    levels are equal, the transfer of all chunks takes (chunks + 2 levels - 1) nβ/chunks. Switches
    add at link speed, so the addition time γ is not counted. No rank acts as a switch, so this
    schedule is simulated and drawn but not executed.

    Args:
        size: Number of ranks, at least 1.
        hosts: Ranks of each host, or number of ranks per host; None: one switch for all ranks.
        chunks: Number of equal parts of the buffer.

    Source: Graham et al. 2016, *Scalable hierarchical aggregation protocol (SHArP)*; before it the
    tree of Blue Gene/L (Adiga et al. 2002). Differs from it: here a switch adds only after all
    messages have arrived; the switches of these systems add earlier.
    """
    if size == 1:
        return
    above = switch_above(size, hosts)
    nodes = np.arange(len(above))
    levels = [level for level in (nodes[:size], nodes[size:-1]) if len(level)]
    steps = [Round(level, above[level], reduce=True) for level in levels]
    steps += [Round(above[level], level, reduce=False) for level in reversed(levels)]
    yield from run_concurrently(
        [*[None] * chunk, *(step.on(nodes, first=chunk) for step in steps)]
        for chunk in range(chunks)
    )
