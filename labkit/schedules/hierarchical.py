"""Allreduce in two levels: inside the hosts, and between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.collective import SUM, collective, everywhere
from labkit.schedules.formulas import Cost, Counts
from labkit.schedules.ring import ring
from labkit.schedules.round import Round, Schedule, beside
from labkit.schedules.tree import broadcast_tree, reduce_tree, tree

Hosts: TypeAlias = Sequence[Sequence[int]] | int


def _counts(size: int, hosts: Hosts | None = None) -> Counts:
    """2(p - h) + 2h(h - 1) messages of h hosts, and 2(p - 1) n."""
    groups = host_groups(size, hosts)
    chunks = len(groups)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for group in groups:
        inside = tree.counts(len(group)).messages
        messages[group], volume[group] = inside, inside * chunks
        # The ring of leaders, in as many chunks as there are hosts.
        messages[group[0]] += 2 * (chunks - 1)
        volume[group[0]] += 2 * (chunks - 1)
    return Counts(messages, volume, chunks)


def _ways(size: int) -> tuple[Cost, ...]:
    """Those through the tree of the larger host, then the ring of the two."""
    between = ring.cost(min(size, 2))
    return tuple(way + between for way in tree.ways(-(-size // 2)))


@collective(
    everywhere(SUM),
    _counts,
    lambda p: tree.cost(-(-p // 2)) + ring.cost(min(p, 2)),
    _ways,
    layout="hosts",
)
def hierarchical(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Reduce to each host's leader, ring between the leaders, broadcast in each host.

        host A   0 ◄─ 1 ◄─ …        0 ──► 1 ──► …
                 │                  ▲
                 └── ring of n/h ───┘          only leaders use the links between hosts
                 │                  ▲
        host B   4 ◄─ 5 ◄─ …        4 ──► 5 ──► …

    Inside a host binomial trees carry whole buffers; the ring divides them into h chunks.

    Args: size: number of ranks, from 1; hosts: the ranks of each host (the first leads), or how
    many ranks a host has; default: two hosts.
    Raises: InvalidInput, where hosts do not hold every rank once.
    Source: Goyal et al. 2017, *Accurate, large minibatch SGD* (arXiv 1706.02677), section 4.
    """
    groups = host_groups(size, hosts)
    yield from _inside(groups, reduce_tree)
    # Leaders alone take part: the others' links between hosts stay free.
    leaders = np.array([group[0] for group in groups])
    for each in ring(len(groups)):
        yield each.on(leaders)
    yield from _inside(groups, broadcast_tree)


def _inside(groups: Sequence[Sequence[int]], schedule: Schedule) -> Iterator[Round]:
    """In all hosts at once; of hosts as large as the one before it is drawn once."""

    def in_hosts(size: int, alike: Sequence[Sequence[int]]) -> Iterator[Round]:
        names = np.array(alike)
        return (each.on(names, parts=len(groups)) for each in schedule(size))

    return beside(in_hosts(size, list(alike)) for size, alike in groupby(groups, len))


def host_groups(size: int, hosts: Hosts | None = None) -> list[list[int]]:
    """The ranks of each host, from a list or from the number of ranks a host; None: of two hosts.

    host_groups(5, 2) = [[0, 1], [2, 3], [4]]

    Raises: InvalidInput, where hosts do not hold every rank once.
    """
    hosts = -(-size // 2) if hosts is None else hosts
    if isinstance(hosts, int):
        if hosts < 1:
            raise InvalidInput(f"hosts={hosts}: a host needs one rank at least")
        ranks = list(range(size))
        return [ranks[start : start + hosts] for start in range(0, size, hosts)]
    groups = [list(group) for group in hosts if len(group)]
    if not np.array_equal(np.sort([rank for group in groups for rank in group]), np.arange(size)):
        raise InvalidInput(
            f"hosts={groups} for {size} ranks: every rank from 0 to {size - 1} must stand in "
            f"exactly one host; give such lists or the number of ranks a host"
        )
    return groups
