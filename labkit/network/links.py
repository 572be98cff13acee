"""The links between a number of ranks: their bandwidths, and the route of each message."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit import schedules
from labkit.common.errors import InvalidInput
from labkit.network.compute_time import uniform
from labkit.network.flows import finish_times
from labkit.network.network import Network
from labkit.schedules.round import Integers

Seconds: TypeAlias = NDArray[np.float64]


class Route(NamedTuple):
    """The routes of messages as arrays of link numbers, where -1 means no link.

    The first link of each route is the outgoing link of the source. On FIFO links, the sending
    process reserves the departure links of a route, and the receiving process reserves the arrival
    links.

    Attributes:
        departure: One array for each link in the first half of the routes, with one link number per
            message.
        arrival: One array for each link in the second half of the routes, with one link number per
            message.
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

    The links of the ranks have the lowest link numbers. The outgoing links of the hosts follow, and
    then the incoming links of the hosts.
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
    """Return arrays of the routes' first links, second links, …; -1 after the end of a route."""
    longest = max(map(len, routes))
    table = np.array([route + [-1] * (longest - len(route)) for route in routes], np.int64)
    return list(table.reshape(len(routes), longest).T)


def _search(neighbours: Mapping[int, Iterable[int]], source: int) -> dict[int, int]:
    """Return each rank's predecessor on its shortest route from a source (breadth-first search)."""
    previous = {source: source}
    queue = deque([source])
    while queue:
        rank = queue.popleft()
        for other in neighbours[rank]:
            if other not in previous:
                previous[other] = rank
                queue.append(other)
    return previous


class Transfers(NamedTuple):
    """The times of the messages of one communication round: arrays with one element per message.

    Attributes:
        start: The time in s at which the first byte of a message leaves the sender.
        delivery: The time in s at which the last byte of a message arrives at the receiver.
        hops: For the first, second, … links of all routes: arrays of link numbers, start times in
            s, end times in s, and fractions of the link's bandwidth. In `hops`, the link number -1
            means that the route of the message has no further link.
    """

    start: Seconds
    delivery: Seconds
    hops: list[tuple[Integers, Seconds, Seconds, Seconds]]


class Links:
    """The links of a network among `size` ranks, with the number of messages each rank has sent.

    Args:
        network: The network whose links are modelled, with its bandwidths and latency.
        size: The number of ranks.
        switches: The number of switches that take part in collectives; their numbers follow those
            of the ranks;
            default: 0.

    Attributes:
        nodes: The total number of ranks and switches.
        names: The names of the links, for figures.
        bandwidth: The bandwidth of each link, in bytes/s, shape (links,).
        hops: The number of links of the longest route.
        numbers: The number of messages that each node has sent, which determines the random delay
            (jitter) of its next message.

    Raises:
        InvalidInput: If the network's hosts, links or slow ranks do not fit the number of ranks.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        absent = [rank for rank in network.stragglers if rank >= size]
        if absent:
            raise InvalidInput(f"stragglers={absent} do not exist; give ranks from 0 to {size - 1}")
        self.network = network
        self.size = size
        self._ends: tuple[Integers, Integers] = np.full(1, -1), np.full(1, -1)
        self.nodes = size + switches
        self._topology = topology(network, size, switches)
        self.names = self._topology.names
        self.bandwidth = self._topology.bandwidth
        self.hops = self._topology.hops
        self.numbers: Integers = np.zeros(self.nodes, np.int64)

    def way(self, source: Integers, destination: Integers) -> Route:
        """Return each message's links; repeated calls with equal arguments return one object."""
        if not (
            np.array_equal(self._ends[0], source) and np.array_equal(self._ends[1], destination)
        ):
            self._ends = source, destination
            self._between = self._topology.way(source, destination)
        return self._between

    def route(self, source: Integers, destination: Integers) -> tuple[Integers, Seconds]:
        """Return the links of each message as one array, and the latencies without jitter.

        Returns:
            links: Link numbers, shape (messages, hops), filled with -1 after a shorter route.
            latency: Seconds from a byte's departure to its arrival, shape (messages,).
        """
        way = self.way(source, destination)
        columns = [*way.departure, *way.arrival]
        none = [np.full(len(source), -1)] * (self.hops - len(columns))
        latency = np.broadcast_to(np.asarray(way.latency, np.float64), len(source))
        return np.stack([*columns, *none], axis=1), latency

    def jitters(self, source: Integers) -> Seconds:
        """Return a random delay for the next message of each source, in s.

        The delay depends on the seed, the source, and the number of messages that the source has
        sent before.
        """
        if not self.network.jitter:
            return np.zeros(len(source))
        order = np.argsort(source, kind="stable")
        number = np.empty_like(source)
        number[order] = positions(source[order]) + self.numbers[source[order]]
        np.add.at(self.numbers, source, 1)
        return self.network.jitter * uniform(self.network.seed, source, number)


def positions(groups: Integers) -> Integers:
    """Return each element's index within its run of equal elements: [5, 5, 7] -> [0, 1, 0]."""
    index = np.arange(len(groups))
    first = np.concatenate([[True], groups[1:] != groups[:-1]])
    return index - np.maximum.accumulate(np.where(first, index, 0))


class Uncontended(Links):
    """A fast model of links, valid if no link transfers messages of two rounds at the same time.

    Raises:
        InvalidInput: If the network's hosts, links or slow ranks do not fit the number of ranks.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        super().__init__(network, size, switches)
        # Routes are padded with the link number -1, the index of the last element, whose bandwidth
        # is infinite.
        self._speed = np.append(self.bandwidth, np.inf)
        self._free: Seconds = np.zeros(len(self._speed))
        self._known: tuple[Route | None, bool, Seconds] = None, False, self._speed
        none: Seconds = np.empty(0)
        self._latest: tuple[Route | None, Seconds, Seconds, Seconds] = None, none, none, none

    def send(
        self,
        source: Integers,
        destination: Integers,
        nbytes: Seconds,
        ready: Seconds,
        shared: bool = True,
    ) -> Transfers | None:
        """Deliver a round's messages; return None if they compete with another round for a link.

        A message leaves its source when all earlier messages of this source have left the source's
        link.

        Args:
            source, destination: The sending and the receiving rank of each message.
            nbytes: Bytes of each message.
            ready: For each message, the time in s at which the source hands it to the network.
            shared: Whether messages of the same round may share links; default: True. The bandwidth
                fractions in `hops` are valid only if no two messages of the round share a link. If
                `shared` is False and messages share links, the result is None.
        """
        way = self.way(source, destination)
        links = [*way.departure, *way.arrival]
        start = np.maximum(ready, self._free[links[0]])
        if self._known[0] is not way:
            contended = bool(np.bincount(np.concatenate(links) + 1)[1:].max(initial=0) > 1)
            self._known = way, contended, self._speed[np.stack(links)].min(axis=0)
        _, contended, rate = self._known
        if (contended and not shared) or any((self._free[link] > start).any() for link in links):
            return None
        if contended:
            stop = self._shared(way, nbytes, start)
            for link in links:
                np.maximum.at(self._free, link, stop)
        else:
            stop = start + nbytes / rate
            for link in links:
                self._free[link] = stop
        self._free[-1] = 0.0
        hops = [(link, start, stop, rate / self._speed[link]) for link in links]
        return Transfers(start, stop + way.latency + self.jitters(source), hops)

    def _shared(self, way: Route, nbytes: Seconds, start: Seconds) -> Seconds:
        """Return end times of messages that share links; compute them once for equal rounds."""
        first = float(start.min())
        known, size, wait, duration = self._latest
        if not (
            known is way and np.array_equal(size, nbytes) and np.array_equal(wait, start - first)
        ):
            wait = start - first
            links = np.stack([*way.departure, *way.arrival], axis=1)
            duration = finish_times(links, nbytes, wait, self.bandwidth)
            self._latest = way, nbytes, wait, duration
        return first + duration
