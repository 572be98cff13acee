"""Allreduce in the network: switches add what comes from below, and send the sum back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import Cost, everybody
from labkit.schedules.hierarchical import Hosts, host_groups
from labkit.schedules.round import Integers, Round, beside


def switch_above(size: int, hosts: Hosts | None = None) -> Integers:
    """The switch above each rank, and behind these above each switch; -1 above the root.

    Switches are numbered after the ranks: one for all, or one a host and one above these.

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
    everywhere(SUM),
    lambda p, chunks=1: everybody(p, chunks * (p > 1), chunks if p > 1 else 1),
    lambda p: Cost(2 * (p > 1), 2 * (p > 1)),
    layout="hosts",
    switches=lambda p, hosts=None, chunks=1: len(switch_above(p, hosts)) - p,
)
def in_network(size: int, hosts: Hosts | None = None, chunks: int = 1) -> Iterator[Round]:
    """Ranks send to their switch, which adds; the sum goes the same way back: 2(α + nβ) a level.

        0 ──┐             ┌──► 0
        1 ──┼──► S ═ sum ═┼──► 1      a message of n from each rank: half of what a ring sends,
        2 ──┘             └──► 2      and two hops however many ranks there are

    With hosts there are two levels, a switch a host and one above these. In chunks, one goes up
    while those before it come down: (chunks + 2 levels - 1) nβ/chunks, where levels are alike.
    Switches add as fast as links bring: they take no γ. No rank is a switch: this is simulated and
    drawn, and not carried out.

    Args: size: number of ranks, from 1; hosts: as for `hierarchical`, None: one switch; chunks.
    Source: Graham et al. 2016, *Scalable hierarchical aggregation protocol (SHArP)*; the tree of
    Blue Gene/L before it (Adiga et al. 2002). Differs from it: a switch adds when all has come.
    """
    if size == 1:
        return
    above = switch_above(size, hosts)
    nodes = np.arange(len(above))
    levels = [level for level in (nodes[:size], nodes[size:-1]) if len(level)]
    steps = [Round(level, above[level], reduce=True) for level in levels]
    steps += [Round(above[level], level, reduce=False) for level in reversed(levels)]
    yield from beside(
        [*[None] * chunk, *(step.on(nodes, first=chunk) for step in steps)]
        for chunk in range(chunks)
    )
