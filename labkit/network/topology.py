"""The routes of messages through the network: a switch, hosts with switches, or a graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit import schedules
from labkit.common.errors import InvalidInput
from labkit.network.network import Network
from labkit.schedules.round import Integers

Seconds: TypeAlias = NDArray[np.float64]


class Route(NamedTuple):
    """The routes of messages as arrays of link numbers, where -1 means no link.

    The first link of each route is the outgoing link of the source. On FIFO links, the sending
    process reserves the departure links of a route. The receiving process reserves the arrival
    links of the route.

    Attributes:
        departure: Numbers of the links in the first half of each route. Each hop has one array,
            with one element per message.
        arrival: Link numbers of the second half of the routes. Each hop has one array, with one
            element per message.
        latency: Latency in seconds, either an array with one value per message or one value for all
            messages.
    """

    departure: list[Integers]
    arrival: list[Integers]
    latency: float | Seconds


def topology(network: Network, size: int, switches: int = 0) -> _Switch | _Graph | _Adding:
    """Return the topology of a network; `switches` is the number of switches that add gradients."""
    if switches:
        return _Adding(network, size)
    if network.links is not None:
        return _Graph(network, size, network.links)
    if network.hosts is not None:
        return _Hosts(network, size, network.hosts)
    return _Switch(network, size, network.bandwidth)


class _Switch:
    """A single switch for n ranks: rank r sends on link r and receives on link n + r."""

    def __init__(self, network: Network, size: int, bandwidth: float) -> None:
        factors = [network.transfer_factor(rank) for rank in range(size)]
        self.network, self.size = network, size
        self.names = [f"rank {rank} {way}" for way in ("out", "in") for rank in range(size)]
        self.bandwidth: Seconds = bandwidth / np.tile(factors, 2)

    @property
    def hops(self) -> int:
        return 2

    def way(self, source: Integers, destination: Integers) -> Route:
        return Route([source], [self.size + destination], self.network.latency)


class _Hosts(_Switch):
    """Hosts with uplinks: the ranks of a host are connected to the host's switch.

    The links of the ranks have the lowest link numbers. The outgoing links of the hosts have the
    next numbers. The incoming links of the hosts have the highest numbers.
    """

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

    def way(self, source: Integers, destination: Integers) -> Route:
        away, home = self.host[source], self.host[destination]
        outside = away != home
        out = np.where(outside, 2 * self.size + away, -1)
        into = np.where(outside, 2 * self.size + self.count + home, -1)
        latency = np.where(outside, self.network.latency, self.inside)
        return Route([source, out], [into, self.size + destination], latency)


class _Adding:
    """A tree of switches that add up messages (`schedules.in_network`), with two links per node.

    The upward link from a node to its parent has the same number as the node. The downward links
    from parents to nodes have the next numbers, also in the order of the nodes.
    """

    hops = 1

    def __init__(self, network: Network, size: int) -> None:
        if network.links is not None:
            raise InvalidInput(
                "an allreduce in the network needs a tree of switches, which links exclude; give a "
                "network without links (hosts are allowed)"
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
        labels = [f"rank {n}" if n < size else f"switch {n - size}" for n in range(nodes)]
        self.names = [f"{label} {way}" for way in ("up", "down") for label in labels]

    def way(self, source: Integers, destination: Integers) -> Route:
        up = self.above[source] == destination
        link = np.where(up, source, len(self.above) + destination)
        return Route([link], [], self.latency[link])


class _Graph:
    """A graph of directed links between ranks; a message uses a route with the fewest links."""

    def __init__(self, network: Network, size: int, links: Mapping[tuple[int, int], float]) -> None:
        self.network, self.size = network, size
        invalid = [pair for pair in links if max(pair) >= size or pair[0] == pair[1]]
        if invalid:
            raise InvalidInput(
                f"links {invalid}: give pairs of different ranks from 0 to {size - 1}"
            )
        pairs = sorted(links)
        self.number = {pair: number for number, pair in enumerate(pairs)}
        self.names = [f"{source} to {destination}" for source, destination in pairs]
        slower = [max(map(network.transfer_factor, pair)) for pair in pairs]
        self.bandwidth: Seconds = np.array([links[pair] for pair in pairs]) / slower
        neighbours: dict[int, list[int]] = {rank: [] for rank in range(size)}
        for source, destination in pairs:
            neighbours[source].append(destination)
        self.previous = {rank: _search(neighbours, rank) for rank in range(size)}

    @property
    def hops(self) -> int:
        pairs = ((source, rank) for source, ranks in self.previous.items() for rank in ranks)
        return max((len(self._route(*pair)) for pair in pairs), default=0)

    def _route(self, source: int, destination: int) -> list[int]:
        if destination not in self.previous[source]:
            raise InvalidInput(
                f"no route leads from rank {source} to rank {destination}: add links to the network"
            )
        route = []
        while destination != source:
            before = self.previous[source][destination]
            route.append(self.number[before, destination])
            destination = before
        return route[::-1]

    def way(self, source: Integers, destination: Integers) -> Route:
        pairs = zip(source.tolist(), destination.tolist(), strict=True)
        routes = [self._route(start, end) for start, end in pairs]
        departures = [route[: -(-len(route) // 2)] for route in routes]
        arrivals = [route[-(-len(route) // 2) :] for route in routes]
        return Route(_padded(departures), _padded(arrivals), self.network.latency)


def _padded(routes: list[list[int]]) -> list[Integers]:
    """Return one array per hop, with each route's link number, or -1 after the route's end."""
    longest = max(map(len, routes))
    table = np.array([route + [-1] * (longest - len(route)) for route in routes], np.int64)
    return list(table.reshape(len(routes), longest).T)


def _search(neighbours: Mapping[int, Iterable[int]], source: int) -> dict[int, int]:
    """Return each rank's predecessor on a shortest route from the source (breadth-first search)."""
    previous = {source: source}
    queue = deque([source])
    while queue:
        rank = queue.popleft()
        for other in neighbours[rank]:
            if other not in previous:
                previous[other] = rank
                queue.append(other)
    return previous
