"""Two-level allreduce in which every rank, not only a leader, sends data between the hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ParamSpec

import numpy as np

from labkit.schedules.butterfly import butterfly
from labkit.schedules.collective import SUM, Collective, all_ranks_hold, collective
from labkit.schedules.formulas import AlphaBetaCost, Counts
from labkit.schedules.hierarchical import Hosts, host_groups
from labkit.schedules.ring import ring
from labkit.schedules.round import Round, circle, count_chunks, join

Call = ParamSpec("Call")


def _counts(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Counts:
    """Count the messages of each rank: to owners of parts, between hosts, and back to all ranks."""
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
    """Return the critical paths on two hosts, of which one may have one rank more than the other.

    One path returns inside the larger host; the other path goes to the other host and ends there.
    """
    parts = max(size // 2, 1)
    if size % 2 == 0 or size == 1:
        return (_cost(butterfly, size),)
    return AlphaBetaCost(2, 2 + 1 / parts, 1), AlphaBetaCost(2 + (parts > 1), 2, 1 + 1 / parts)


def _between(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Run one schedule per part between hosts, all at once; `two_level` defines the parts."""
    groups = host_groups(size, hosts)
    parts = min(map(len, groups))
    peers = np.array([group[:parts] for group in groups]).T  # (parts, hosts)
    first = np.arange(parts) * count_chunks(by(len(groups)))
    return (step.on(peers, first=first) for step in by(len(groups)))


def _levels(
    by: Collective[[int]], critical_paths: Callable[[int], tuple[AlphaBetaCost, ...]]
) -> Callable[[Callable[Call, Iterable[Round]]], Collective[Call]]:
    """Return a decorator for a two-level schedule that uses the collective `by` between hosts."""
    counts, cost = partial(_counts, by), partial(_cost, by)
    between = partial(_between, by)
    return collective(
        all_ranks_hold(SUM), counts, cost, critical_paths, layout="hosts", between=between
    )


@_levels(ring, lambda size: (_cost(ring, size),))
def two_level(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Sum each part on one rank per host, run a ring per part between hosts, then share the sums.

        host A   0 ◄──► 1      rank 0 adds part 0 of both ranks, rank 1 adds part 1; host B likewise
                 ▲      ▲
                 │      │      one ring per part, all concurrent: 2(h - 1)/h n leaves a host
                 ▼      ▼
        host B   2 ◄──► 3      each rank sends its part to the others

    The number P of parts is the number of ranks of the smallest host; in larger hosts, the other
    ranks own no part. On real hosts, the rounds inside a host use shared memory.

    Args:
        size: Number of ranks, at least 1.
        hosts: Ranks of each host, or number of ranks per host; invalid hosts raise an error as in
            `hierarchical`.

    Source: Cho, Finkler, Serrano, Kung and Hunter 2019, *BlueConnect: decomposing all-reduce for
    deep learning on heterogeneous network hierarchy*. Differs from it: inside a host, a single
    round, which adds in rank order, replaces the paper's ring.
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
        hosts: Ranks of each host, or number of ranks per host; invalid hosts raise an error as in
            `hierarchical`.

    Source: as `two_level`, with a butterfly instead of the ring.
    """
    return _rounds(butterfly, size, hosts)


def _rounds(by: Collective[[int]], size: int, hosts: Hosts | None) -> Iterator[Round]:
    groups = host_groups(size, hosts)
    chunks = count_chunks(by(len(groups)))
    yield from _inside(groups, chunks, reduce=True)
    yield from _between(by, size, hosts)
    yield from _inside(groups, chunks, reduce=False)


def _inside(groups: Sequence[Sequence[int]], chunks: int, *, reduce: bool) -> Iterator[Round]:
    """Yield one round that sends all parts to their owners, or each owner's part to all ranks."""
    rounds = []
    for group in groups:
        source, destination = circle(len(group))
        owner = destination if reduce else source
        step = Round(source, destination, owner * chunks, chunks, reduce=reduce)
        rounds.append(step.take(owner < min(map(len, groups))).on(group))
    if len(messages := join(rounds)):
        yield messages
