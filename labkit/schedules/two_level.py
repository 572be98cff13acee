"""Allreduce in two levels in which every rank sends: parts inside the hosts and between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import ParamSpec

import numpy as np

from labkit.schedules.butterfly import butterfly
from labkit.schedules.collective import SUM, Collective, collective, everywhere
from labkit.schedules.formulas import Cost, Counts
from labkit.schedules.hierarchical import Hosts, host_groups
from labkit.schedules.ring import ring
from labkit.schedules.round import Round, circle, count_chunks, join

Call = ParamSpec("Call")


def _counts(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Counts:
    """Others' parts to who owns them, its own between hosts and to the others of its host."""
    groups = host_groups(size, hosts)
    parts, between = min(map(len, groups)), by.counts(len(groups))
    messages, volume = np.zeros(size, np.int64), np.zeros(size, np.int64)
    for host, group in enumerate(groups):
        owns = np.arange(len(group)) < parts
        inside = parts - owns + owns * (len(group) - 1)
        messages[group] = inside + owns * between.messages[host]
        volume[group] = inside * between.chunks + owns * between.volume[host]
    return Counts(messages, volume, parts * between.chunks)


def _cost(by: Collective[[int]], size: int) -> Cost:
    """Two rounds inside the larger one of two hosts, and 1/P of what it costs between them."""
    most, parts = -(-size // 2), max(size // 2, 1)
    between, inside = by.cost(min(size, 2)), (most - 1) / parts
    alone = Cost(between.alpha, between.beta / parts, between.gamma / parts)
    return Cost(2 * (most > 1), 2 * inside, inside) + alone


def _butterfly_ways(size: int) -> tuple[Cost, ...]:
    """Where one of two hosts has a rank more: back inside it, or over to the other, and on."""
    parts = max(size // 2, 1)
    if size % 2 == 0 or size == 1:
        return (_cost(butterfly, size),)
    return Cost(2, 2 + 1 / parts, 1), Cost(2 + (parts > 1), 2, 1 + 1 / parts)


def _between(by: Collective[[int]], size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """As many schedules beside each other as the least host has ranks, a part each."""
    groups = host_groups(size, hosts)
    parts = min(map(len, groups))
    peers = np.array([group[:parts] for group in groups]).T  # (parts, hosts)
    first = np.arange(parts) * count_chunks(by(len(groups)))
    return (each.on(peers, first=first) for each in by(len(groups)))


def _levels(
    by: Collective[[int]], ways: Callable[[int], tuple[Cost, ...]]
) -> Callable[[Callable[Call, Iterable[Round]]], Collective[Call]]:
    """Stands above a schedule of two levels, with `by` between hosts."""
    counts, cost = partial(_counts, by), partial(_cost, by)
    between = partial(_between, by)
    return collective(everywhere(SUM), counts, cost, ways, layout="hosts", between=between)


@_levels(ring, lambda size: (_cost(ring, size),))
def two_level(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """Add up a part a rank inside each host, rings between hosts, share the parts in each host.

        host A   0 ◄──► 1      part 0 of both is added up by 0, part 1 by 1; the same in host B
                 ▲      ▲
                 │      │      a ring a part, all beside each other: 2(h - 1)/h n out of a host
                 ▼      ▼
        host B   2 ◄──► 3      each gives its part to the others

    There are P parts, as many as the least host has ranks; a host's further ranks own none. On
    real hosts what happens inside them happens in shared memory.

    Args: size: number of ranks, from 1; hosts: as for `hierarchical`, with its error.
    Source: Cho, Finkler, Serrano, Kung and Hunter 2019, *BlueConnect: decomposing all-reduce for
    deep learning on heterogeneous network hierarchy*. Differs from it: one round inside a host,
    which adds in order of rank, in place of a ring.
    """
    return _rounds(ring, size, hosts)


@_levels(butterfly, _butterfly_ways)
def two_level_butterfly(size: int, hosts: Hosts | None = None) -> Iterator[Round]:
    """The same with a butterfly between hosts: lg h rounds of a whole part, for short buffers.

        host A   0 ◄──► 1
                 ▲      ▲      0 ↔ 2 part 0, 1 ↔ 3 part 1: lg h n out of a host
                 ▼      ▼
        host B   2 ◄──► 3

    Args: size: number of ranks, from 1; hosts: as for `hierarchical`, with its error.
    Source: as `two_level`, with a butterfly in place of its ring.
    """
    return _rounds(butterfly, size, hosts)


def _rounds(by: Collective[[int]], size: int, hosts: Hosts | None) -> Iterator[Round]:
    groups = host_groups(size, hosts)
    chunks = count_chunks(by(len(groups)))
    yield from _inside(groups, chunks, reduce=True)
    yield from _between(by, size, hosts)
    yield from _inside(groups, chunks, reduce=False)


def _inside(groups: Sequence[Sequence[int]], chunks: int, *, reduce: bool) -> Iterator[Round]:
    """In one round all send their parts to who owns them, or owners send theirs to all others."""
    rounds = []
    for group in groups:
        source, destination = circle(len(group))
        owner = destination if reduce else source
        each = Round(source, destination, owner * chunks, chunks, reduce=reduce)
        rounds.append(each.take(owner < min(map(len, groups))).on(group))
    if len(whole := join(rounds)):
        yield whole
