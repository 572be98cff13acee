"""Which links lie on the way of a message: a switch, hosts behind uplinks, any graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit import schedules
from labkit.common.errors import InvalidInput
from labkit.network.model import Network
from labkit.schedules.round import Integers

Seconds: TypeAlias = NDArray[np.float64]


class Way(NamedTuple):
    """Links on the way of each message, in columns; -1 is no link.

    The first link is the source's own. Of links that serve one message after the other the sender
    books the first half of the way, the receiver the rest.
    """

    departure: list[Integers]
    arrival: list[Integers]
    latency: float | Seconds


def topology(network: Network, size: int, switches: int = 0) -> _Switch | _Graph | _Adding:
    if switches:
        return _Adding(network, size)
    if network.links is not None:
        return _Graph(network, size, network.links)
    if network.hosts is not None:
        return _Hosts(network, size, network.hosts)
    return _Switch(network, size, network.bandwidth)


class _Switch:
    """Every rank has a link out (number r) and a link in (size + r) to one switch."""

    def __init__(self, network: Network, size: int, bandwidth: float) -> None:
        factors = [network.transfer_factor(rank) for rank in range(size)]
        self.network, self.size = network, size
        self.names = [f"rank {rank} {way}" for way in ("out", "in") for rank in range(size)]
        self.bandwidth: Seconds = bandwidth / np.tile(factors, 2)

    @property
    def hops(self) -> int:
        return 2

    def way(self, source: Integers, destination: Integers) -> Way:
        return Way([source], [self.size + destination], self.network.latency)


class _Hosts(_Switch):
    """Links of ranks end in their host's switch; a host's links out and in follow in number."""

    def __init__(self, network: Network, size: int, hosts: int | Iterable[Iterable[int]]) -> None:
        super().__init__(network, size, network.host_bandwidth or network.bandwidth)
        inside = network.host_latency
        self.inside = network.latency if inside is None else inside
        groups = schedules.host_groups(
            size, hosts if isinstance(hosts, int) else [list(host) for host in hosts]
        )
        self.count = len(groups)
        self.host: Integers = np.empty(size, np.int64)
        for number, group in enumerate(groups):
            self.host[group] = number
        self.names += [f"host {host} {way}" for way in ("out", "in") for host in range(self.count)]
        uplinks = np.full(2 * self.count, network.bandwidth)
        self.bandwidth = np.concatenate([self.bandwidth, uplinks])

    @property
    def hops(self) -> int:
        return 4

    def way(self, source: Integers, destination: Integers) -> Way:
        away, home = self.host[source], self.host[destination]
        outside = away != home
        out = np.where(outside, 2 * self.size + away, -1)
        into = np.where(outside, 2 * self.size + self.count + home, -1)
        latency = np.where(outside, self.network.latency, self.inside)
        return Way([source, out], [into, self.size + destination], latency)


class _Adding:
    """A tree of switches that add (`schedules.in_network`): a link up and one down for each node.

    A node's link up has its number, its link down follows behind those of all.
    """

    hops = 1

    def __init__(self, network: Network, size: int) -> None:
        if network.links is not None:
            raise InvalidInput(
                "switches that add stand in a tree of their own: give a network without links, "
                "with hosts or without"
            )
        hosts = network.hosts
        groups = list(map(list, hosts)) if isinstance(hosts, tuple) else hosts
        self.above = schedules.switch_above(size, groups)
        below, nodes = np.arange(len(self.above)) < size, len(self.above)
        inner = network.host_bandwidth or network.bandwidth
        factors = np.ones(nodes)
        factors[:size] = [network.transfer_factor(rank) for rank in range(size)]
        self.bandwidth: Seconds = np.tile(np.where(below, inner, network.bandwidth) / factors, 2)
        near = network.latency if network.host_latency is None else network.host_latency
        self.latency: Seconds = np.tile(np.where(below, near, network.latency), 2)
        named = [f"rank {n}" if n < size else f"switch {n - size}" for n in range(nodes)]
        self.names = [f"{name} {way}" for way in ("up", "down") for name in named]

    def way(self, source: Integers, destination: Integers) -> Way:
        up = self.above[source] == destination
        link = np.where(up, source, len(self.above) + destination)
        return Way([link], [], self.latency[link])


class _Graph:
    """Directed links between ranks; a way leads over the fewest hops."""

    def __init__(self, network: Network, size: int, links: Mapping[tuple[int, int], float]) -> None:
        self.network, self.size = network, size
        strange = [pair for pair in links if max(pair) >= size or pair[0] == pair[1]]
        if strange:
            raise InvalidInput(
                f"links {strange}: give pairs of different ranks from 0 to {size - 1}"
            )
        pairs = sorted(links)
        self.number = {pair: number for number, pair in enumerate(pairs)}
        self.names = [f"{source} to {destination}" for source, destination in pairs]
        slower = [max(map(network.transfer_factor, pair)) for pair in pairs]
        self.bandwidth: Seconds = np.array([links[pair] for pair in pairs]) / slower
        near: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for source, destination in pairs:
            near[source].append(destination)
        self.previous = {rank: _search(near, rank) for rank in range(size)}

    @property
    def hops(self) -> int:
        ways = ((one, other) for one, near in self.previous.items() for other in near)
        return max((len(self._route(*ends)) for ends in ways), default=0)

    def _route(self, source: int, destination: int) -> list[int]:
        if destination not in self.previous[source]:
            raise InvalidInput(
                f"no way leads from rank {source} to rank {destination}: add links to the network"
            )
        route = []
        while destination != source:
            before = self.previous[source][destination]
            route.append(self.number[before, destination])
            destination = before
        return route[::-1]

    def way(self, source: Integers, destination: Integers) -> Way:
        pairs = zip(source.tolist(), destination.tolist(), strict=True)
        routes = [self._route(one, other) for one, other in pairs]
        departures = [route[: -(-len(route) // 2)] for route in routes]
        arrivals = [route[-(-len(route) // 2) :] for route in routes]
        return Way(_padded(departures), _padded(arrivals), self.network.latency)


def _padded(routes: list[list[int]]) -> list[Integers]:
    """Columns of the first links, the second, …; -1 behind the end of a shorter route."""
    longest = max(map(len, routes))
    table = np.array([route + [-1] * (longest - len(route)) for route in routes], np.int64)
    return list(table.reshape(len(routes), longest).T)


def _search(near: Mapping[int, Iterable[int]], source: int) -> dict[int, int]:
    """The rank before each rank on the way from the source, breadth first."""
    previous = {source: source}
    queue = deque([source])
    while queue:
        rank = queue.popleft()
        for other in near[rank]:
            if other not in previous:
                previous[other] = rank
                queue.append(other)
    return previous
