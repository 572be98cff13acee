"""Allreduces with two levels (within and between hosts), and allreduces in network switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import ParamSpec, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.schedules.collective import (
    SUM,
    AlphaBetaCost,
    Collective,
    Counts,
    all_ranks_hold,
    collective,
    uniform_counts,
)
from labkit.schedules.collectives import broadcast_tree, butterfly, reduce_tree, ring, tree
from labkit.schedules.round import (
    Integers,
    Round,
    Schedule,
    circle,
    count_chunks,
    join,
    run_concurrently,
)

Hosts: TypeAlias = Sequence[Sequence[int]] | int


def _counts(size: int, hosts: Hosts | None = None) -> Counts:
    """Return the counts of 2(p - h) + 2h(h - 1) messages for p ranks on h hosts."""
    groups = host_groups(size, hosts)
    chunks = len(groups)
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for group in groups:
        inside = tree.counts(len(group)).messages
        messages[group], volume[group] = inside, inside * chunks
        # The ring between the hosts' leaders divides the buffer into one chunk per host.
        messages[group[0]] += 2 * (chunks - 1)
        volume[group[0]] += 2 * (chunks - 1)
    return Counts(messages, volume, chunks)


def _critical_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the critical paths; each crosses the tree of the larger host and the ring of hosts."""
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
        hosts: Either one list of ranks per host, or the number of ranks per host. The first rank of
            a list is the host's leader. Default: two hosts.

    Raises:
        InvalidInput: If the hosts do not contain every rank exactly once.

    Source: Goyal et al. 2017, *Accurate, large minibatch SGD* (arXiv 1706.02677), section 4.
    """
    groups = host_groups(size, hosts)
    yield from _inside(groups, reduce_tree)
    # Only one leader per host takes part in the ring. Other ranks do not use the links between
    # hosts.
    leaders = np.array([group[0] for group in groups])
    for step in ring(len(groups)):
        yield step.on(leaders)
    yield from _inside(groups, broadcast_tree)


def _inside(groups: Sequence[Sequence[int]], schedule: Schedule) -> Iterator[Round]:
    """Run a schedule in all hosts at once; adjacent hosts of equal size are computed together."""

    def in_hosts(size: int, equal: Sequence[Sequence[int]]) -> Iterator[Round]:
        names = np.array(equal)
        return (step.on(names, parts=len(groups)) for step in schedule(size))

    return run_concurrently(in_hosts(size, list(equal)) for size, equal in groupby(groups, len))


def host_groups(size: int, hosts: Hosts | None = None) -> list[list[int]]:
    """Return the ranks of each host, from a list or from the number of ranks per host.

    For example, host_groups(5, 2) = [[0, 1], [2, 3], [4]]; if `hosts` is None, there are two hosts.

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


Call = ParamSpec("Call")


def _two_level_counts(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Counts:
    """Count each rank's messages in reduce-scatter, exchange between hosts, and allgather."""
    groups = host_groups(size, hosts)
    parts, between = min(map(len, groups)), by.counts(len(groups))
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for host, group in enumerate(groups):
        owns = np.arange(len(group)) < parts
        inside = parts - owns + owns * (len(group) - 1)
        messages[group] = inside + owns * between.messages[host]
        volume[group] = inside * between.chunks + owns * between.volume[host]
    return Counts(messages, volume, parts * between.chunks)


def _cost(by: Collective[[int]], size: int) -> AlphaBetaCost:
    """Return the cost on two hosts: two rounds in the larger host, one exchange between hosts."""
    larger, parts = -(-size // 2), max(size // 2, 1)
    between, inside = by.cost(min(size, 2)), (larger - 1) / parts
    parts_between = AlphaBetaCost(between.alpha, between.beta / parts, between.gamma / parts)
    return AlphaBetaCost(2 * (larger > 1), 2 * inside, inside) + parts_between


def _butterfly_paths(size: int) -> tuple[AlphaBetaCost, ...]:
    """Return the critical paths on two hosts whose numbers of ranks differ by at most one.

    The first path ends in the larger host; the second path ends in the smaller host.
    """
    parts = max(size // 2, 1)
    if size % 2 == 0 or size == 1:
        return (_cost(butterfly, size),)
    return AlphaBetaCost(2, 2 + 1 / parts, 1), AlphaBetaCost(2 + (parts > 1), 2, 1 + 1 / parts)


def _between(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Run a schedule between hosts once per part of the buffer, for all parts at the same time."""
    groups = host_groups(size, hosts)
    parts = min(map(len, groups))
    peers = np.array([group[:parts] for group in groups]).T  # (parts, hosts)
    first = np.arange(parts) * count_chunks(by(len(groups)))
    return (step.on(peers, first=first) for step in by(len(groups)))


def _levels(
    by: Collective[[int]], critical_paths: Callable[[int], tuple[AlphaBetaCost, ...]]
) -> Callable[[Callable[Call, Iterable[Round]]], Collective[Call]]:
    """Return a decorator for a two-level schedule that uses the collective `by` between hosts."""
    counts, cost = partial(_two_level_counts, by), partial(_cost, by)
    between = partial(_between, by)
    return collective(
        all_ranks_hold(SUM), counts, cost, critical_paths, layout="hosts", between=between
    )


@_levels(ring, lambda size: (_cost(ring, size),))
def two_level(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Sum each part on one rank per host, then over hosts in rings, then share the sums.

        host A   0 ◄──► 1      rank 0 adds part 0 of both ranks, rank 1 adds part 1; host B likewise
                 ▲      ▲
                 │      │      one ring per part, all concurrent: 2(h - 1)/h n leaves a host
                 ▼      ▼
        host B   2 ◄──► 3      each rank sends its part to the others

    The number P of parts is the number of ranks of the smallest host. In a larger host, the surplus
    ranks own no part. On real hosts, the rounds inside a host use shared memory.

    Args:
        size: Number of ranks, at least 1.
        hosts: Ranks of each host, or number of ranks per host. Invalid hosts raise the same error
            as in `hierarchical`.

    Source: Cho, Finkler, Serrano, Kung and Hunter 2019, *BlueConnect: decomposing all-reduce for
    deep learning on heterogeneous network hierarchy*. Difference from the paper: inside a host, one
    round that adds in rank order replaces the paper's ring.
    """
    return _rounds(ring, size, hosts)


@_levels(butterfly, _butterfly_paths)
def two_level_butterfly(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Two-level allreduce with butterflies between h hosts: lg h rounds, fast for short buffers.

        host A   0 ◄──► 1
                 ▲      ▲      0 ↔ 2 part 0, 1 ↔ 3 part 1: lg h n leaves a host
                 ▼      ▼
        host B   2 ◄──► 3

    Args:
        size: Number of ranks, at least 1.
        hosts: Ranks of each host, or number of ranks per host. Invalid hosts raise the same error
            as in `hierarchical`.

    Source: see the function `two_level`; a butterfly replaces the ring.
    """
    return _rounds(butterfly, size, hosts)


def _rounds(by: Collective[[int]], size: int, hosts: Hosts | None) -> Iterator[Round]:
    groups = host_groups(size, hosts)
    chunks = count_chunks(by(len(groups)))
    yield from _two_level_inside(groups, chunks, reduce=True)
    yield from _between(by, size, hosts)
    yield from _two_level_inside(groups, chunks, reduce=False)


def _two_level_inside(
    groups: Sequence[Sequence[int]], chunks: int, *, reduce: bool
) -> Iterator[Round]:
    """Yield one round: parts go to their owners if `reduce`, else owners send them to all ranks."""
    rounds = []
    for group in groups:
        source, destination = circle(len(group))
        owner = destination if reduce else source
        step = Round(source, destination, owner * chunks, chunks, reduce=reduce)
        rounds.append(step.take(owner < min(map(len, groups))).on(group))
    if len(messages := join(rounds)):
        yield messages


def switch_above(size: int, hosts: Hosts | None = None) -> Integers:
    """Return the index of the switch above each rank and each switch; the root switch gets -1.

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
    """Switches in the network sum the buffers of all ranks.

        0 ──┐             ┌──► 0
        1 ──┼──► S ═ sum ═┼──► 1      one message of n per rank: half of a ring's volume,
        2 ──┘             └──► 2      and two hops for any number of ranks

    With hosts there are two levels: one switch per host and a root switch. If the buffer has
    several chunks, ranks send later chunks while they receive the sums of earlier chunks. Let all
    links be equal, with the transfer time β per byte. The transfer of n bytes then takes (chunks +
    2 · levels - 1) · nβ/chunks. Switches add at link speed, so the addition time γ is not counted.
    No rank acts as a switch, so labkit simulates and draws the schedule, but does not execute it.

    Args:
        size: Number of ranks, at least 1.
        hosts: Ranks of each host, or number of ranks per host; None: one switch for all ranks.
        chunks: Number of equal parts of the buffer.

    Source: Graham et al. 2016, *Scalable hierarchical aggregation protocol (SHArP)*; before it the
    tree of Blue Gene/L (Adiga et al. 2002). Difference from the paper: each switch waits for all
    messages before adding.
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
