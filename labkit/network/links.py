"""The links between a number of ranks: their bandwidths, and the route of each message.

With `Network(sharing="fifo")`, a link is a FIFO queue that transfers one message at a time.

A message of n bytes occupies each link for n / b seconds. The symbol b stands for the link's
bandwidth in bytes/s. A message starts on a link as soon as the link is free. A message must first
have started on the previous link of its route. The model is cut-through switching with switches
that never block. A message moves at the speed of the slowest link of its route. A message arrives
`latency` seconds after its last byte leaves. FIFO links occupy a shared uplink for too long if
senders' links are slower. For example, each of k senders may have 1/k of the uplink's bandwidth. In
a real network, several senders share an uplink at the same time. The class `Flows` also models a
shared uplink.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network.compute_time import uniform
from labkit.network.flows import finish_times
from labkit.network.network import Network
from labkit.network.topology import Route, Seconds, topology
from labkit.schedules.round import Integers


class Transfers(NamedTuple):
    """The times of the messages of one communication round, as arrays with one value per message.

    Attributes:
        start: The time in s at which the first byte of a message leaves the sender.
        delivery: The time in s at which the last byte of a message arrives at the receiver.
        hops: One tuple for each position in the routes (first link, second link, …). Each tuple
            contains arrays of link numbers, start times, and end times in s. The last array of each
            tuple contains fractions of the link's bandwidth. In `hops`, the link number -1 means
            that the route of the message has no further link.
    """

    start: Seconds
    delivery: Seconds
    hops: list[tuple[Integers, Seconds, Seconds, Seconds]]


class Links:
    """The links of a network among `size` ranks, with the number of messages each rank has sent.

    Args:
        network: The network whose links are modelled, with its bandwidths and latency.
        size: The number of ranks.
        switches: The number of switches that take part in collectives; ranks are numbered first,
            then switches; default: 0.

    Attributes:
        nodes: The total number of ranks and switches.
        names: The names of the links, for figures.
        bandwidth: The bandwidth of each link, in bytes/s, shape (links,).
        hops: The number of links of the longest route.
        numbers: The number of messages that each node has sent. The number determines the random
            delay (jitter) of the node's next message.

    Raises:
        InvalidInput: The network's hosts, links or slow ranks do not fit the number of ranks.
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
            links: Link numbers, shape (messages, hops); shorter routes are padded with -1.
            latency: Seconds from a byte's departure to its arrival, shape (messages,).
        """
        way = self.way(source, destination)
        columns = [*way.departure, *way.arrival]
        none = [np.full(len(source), -1)] * (self.hops - len(columns))
        latency = np.broadcast_to(np.asarray(way.latency, np.float64), len(source))
        return np.stack([*columns, *none], axis=1), latency

    def jitters(self, source: Integers) -> Seconds:
        """Return a random delay for the next message of each source, in s.

        The random delay depends on the seed and the source. The delay also depends on the number of
        messages that the source has sent.
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
        InvalidInput: The network's hosts, links or slow ranks do not fit the number of ranks.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        super().__init__(network, size, switches)
        # Short routes are padded with the link number -1, which selects the last array element, an
        # infinite bandwidth.
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


class FifoLinks(Links):
    """FIFO links, each with the time until which it is busy with earlier messages.

    `send` delivers all messages of a communication round in one call. `depart` and `arrive`
    together do the same as `send`, for one message. `depart` needs only the state of the sender's
    links; `arrive` needs only the state of the receiver's links. The methods `depart` and `arrive`
    each need the links of only one rank. Ranks in different processes can therefore each have their
    own `FifoLinks` object. The array `busy` must be in shared memory only for emulated hosts with
    uplinks. In the right order of calls, `depart` and `arrive` return the times of `send`. The
    right order of calls is the order in which links serve messages.

    Args:
        network: The network whose links are modelled, with its bandwidths and latency.
        size: The number of ranks.
        switches: The number of switches that take part in collectives; default: 0.

    Attributes:
        busy: For each link, the time in s at which its last message so far ends, shape (links,).
            The array `busy` may be replaced by an array in shared memory.

    Raises:
        InvalidInput: The network's hosts, links or slow ranks do not fit the number of ranks.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        super().__init__(network, size, switches)
        self.busy: Seconds = np.zeros(len(self.names))
        self._ways: dict[tuple[int, int], tuple[list[int], list[int], float, float]] = {}

    def send(
        self,
        source: Integers,
        destination: Integers,
        nbytes: Seconds,
        ready: Seconds,
        shared: bool = True,
    ) -> Transfers:
        """Deliver the messages of a round.

        Each link first serves the message with the earliest ready time. Messages with equal ready
        times keep their order in the round.

        Args:
            source, destination: The sending and the receiving rank of each message.
            nbytes: Bytes of each message.
            ready: For each message, the time in s at which the source hands it to the network.
            shared: Ignored. `FifoLinks.send` ignores the argument `shared`, which exists only
                because `Uncontended.send` has the same argument.
        """
        way = self.way(source, destination)
        slowest = np.zeros(len(source))
        served = []
        start = ready
        for link in way.departure:
            start = self._serve(link, start, nbytes, slowest)
            served.append((link, start))
        first_byte = start
        if self.network.jitter:
            first_byte = start = start + self.jitters(source)
        for link in way.arrival:
            start = self._serve(link, start, nbytes, slowest)
            served.append((link, start))
        whole = np.ones(len(source))
        hops = [(link, t, t + nbytes / self.bandwidth[link], whole) for link, t in served]
        return Transfers(first_byte, start + slowest + way.latency, hops)

    def depart(self, source: int, destination: int, nbytes: float, now: float) -> float:
        """Return the time in s at which the first byte of a message leaves the sender's links."""
        start = now
        for link in self._way(source, destination)[0]:
            start = max(start, float(self.busy[link]))
            self.busy[link] = start + nbytes / self.bandwidth[link]
        if self.network.jitter:
            start += float(self.jitters(np.array([source]))[0])
        return start

    def arrive(self, source: int, destination: int, nbytes: float, first_byte: float) -> float:
        """Return the delivery time of a message, in s.

        Args:
            source, destination: The ranks of sender and receiver.
            nbytes: Bytes of the message.
            first_byte: The time in s that `depart` returned for the message.
        """
        start = first_byte
        _, arrival, bandwidth, latency = self._way(source, destination)
        for link in arrival:
            start = max(start, float(self.busy[link]))
            self.busy[link] = start + nbytes / self.bandwidth[link]
        return start + nbytes / bandwidth + latency

    def _way(self, source: int, destination: int) -> tuple[list[int], list[int], float, float]:
        """Return a route's departure links and arrival links, lowest bandwidth, and latency."""
        key = (source, destination)
        if key not in self._ways:
            way = self.way(np.array([source]), np.array([destination]))
            departure = [int(link[0]) for link in way.departure if link[0] >= 0]
            arrival = [int(link[0]) for link in way.arrival if link[0] >= 0]
            slowest = float(self.bandwidth[departure + arrival].min())
            self._ways[key] = departure, arrival, slowest, float(np.max(way.latency))
        return self._ways[key]

    def _serve(self, link: Integers, ready: Seconds, nbytes: Seconds, slowest: Seconds) -> Seconds:
        """Reserve a link per message, update the maxima in `slowest`, and return start times."""
        exists = link >= 0
        if not exists.all():
            start = ready.copy()
            part = slowest[exists]
            start[exists] = self._serve(link[exists], ready[exists], nbytes[exists], part)
            slowest[exists] = part
            return start
        duration = nbytes / self.bandwidth[link]
        np.maximum(slowest, duration, out=slowest)
        if np.bincount(link, minlength=1).max() <= 1:
            return self._book(link, ready, duration)
        start = np.empty_like(ready)
        for rows in _turns(link, ready):
            start[rows] = self._book(link[rows], ready[rows], duration[rows])
        return start

    def _book(self, link: Integers, ready: Seconds, duration: Seconds) -> Seconds:
        """Reserve links for messages that all use different links; return their start times."""
        start = np.maximum(ready, self.busy[link])
        self.busy[link] = start + duration
        return start


def _turns(link: Integers, ready: Seconds) -> list[Integers]:
    """Return arrays of indices: the first message of each link's queue, the second, and so on."""
    order = np.lexsort((ready, link))
    position = positions(link[order])
    by_turn = order[np.argsort(position, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(position))[:-1])
