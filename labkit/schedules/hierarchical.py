"""Allreduce in two levels: first inside each host, then between the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.collective import SUM, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, Counts
from labkit.schedules.ring import ring
from labkit.schedules.round import Round, Schedule, run_concurrently
from labkit.schedules.tree import broadcast_tree, reduce_tree, tree

Hosts: TypeAlias = Sequence[Sequence[int]] | int


def _counts(size: int, hosts: Hosts | None = None) -> Counts:
    """Return the counts of p ranks on h hosts: 2(p - h) + 2h(h - 1) messages, volume 2(p - 1) n."""
    groups = host_groups(size, hosts)
    chunks = len(groups)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for group in groups:
        inside = tree.counts(len(group)).messages
        messages[group], volume[group] = inside, inside * chunks
        # The ring of leaders divides the buffer into as many chunks as there are hosts.
        messages[group[0]] += 2 * (chunks - 1)
        volume[group[0]] += 2 * (chunks - 1)
    return Counts(messages, volume, chunks)


def _critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return critical paths: through the tree of the larger host, then around the ring of hosts."""
    between = ring.cost(min(size, 2))
    return tuple(path + between for path in tree.critical_paths(-(-size // 2)))


@collective(
    all_ranks_hold(SUM),
    _counts,
    lambda p: tree.cost(-(-p // 2)) + ring.cost(min(p, 2)),
    _critical_paths,
    layout="hosts",
)
def hierarchical(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Reduce to a leader in each host, allreduce on a ring of leaders, broadcast in each host.

        host A   0 ◄─ 1 ◄─ …        0 ──► 1 ──► …
                 │                  ▲
                 └── ring of n/h ───┘          only leaders use the links between hosts
                 │                  ▲
        host B   4 ◄─ 5 ◄─ …        4 ──► 5 ──► …

    Inside a host, binomial trees carry whole buffers. The ring of h leaders divides the buffer into
    h chunks.

    Args:
        size: Number of ranks, at least 1.
        hosts: The ranks of each host (the first rank is the leader), or the number of ranks per
            host; default: two hosts.

    Raises:
        InvalidInput: If the hosts do not contain every rank exactly once.

    Source: Goyal et al. 2017, *Accurate, large minibatch SGD* (arXiv 1706.02677), section 4.
    """
    groups = host_groups(size, hosts)
    yield from _inside(groups, reduce_tree)
    # Only leaders take part in the ring; the other ranks do not use the links between hosts.
    leaders = np.array([group[0] for group in groups])
    for step in ring(len(groups)):
        yield step.on(leaders)
    yield from _inside(groups, broadcast_tree)


def _inside(groups: Sequence[Sequence[int]], schedule: Schedule) -> Iterator[Round]:
    """Run a schedule in all hosts at once; adjacent hosts of equal size share the same rounds."""

    def in_hosts(size: int, equal: Sequence[Sequence[int]]) -> Iterator[Round]:
        names = np.array(equal)
        return (step.on(names, parts=len(groups)) for step in schedule(size))

    return run_concurrently(in_hosts(size, list(equal)) for size, equal in groupby(groups, len))


def host_groups(size: int, hosts: Hosts | None = None) -> list[list[int]]:
    """Return the ranks of each host, from a list or from the number of ranks per host.

    For example, host_groups(5, 2) = [[0, 1], [2, 3], [4]]; `hosts` None means two hosts.

    Raises:
        InvalidInput: If the hosts do not contain every rank exactly once.
    """
    hosts = -(-size // 2) if hosts is None else hosts
    if isinstance(hosts, int):
        if hosts < 1:
            raise InvalidInput(
                f"hosts={hosts} gives a host no rank; give at least one rank per host"
            )
        ranks = list(range(size))
        return [ranks[start : start + hosts] for start in range(0, size, hosts)]
    groups = [list(group) for group in hosts if len(group)]
    if not np.array_equal(np.sort([rank for group in groups for rank in group]), np.arange(size)):
        raise InvalidInput(
            f"hosts={groups} for {size} ranks: every rank from 0 to {size - 1} must be on "
            f"exactly one host; give the lists of ranks or the number of ranks per host"
        )
    return groups
