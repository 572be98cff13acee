"""FIFO links, each of which transfers one message at a time: `Network(sharing="fifo")`.

A message of n bytes occupies each link of its route for n / bandwidth seconds, with the bandwidth
of that link. A message starts on a link when the link is free and the message has started on the
previous link: cut-through, with switches that never block. A message moves at the speed of the
slowest link of its route, and arrives `latency` seconds after its last byte leaves. FIFO links
occupy a shared uplink for too long if each of k senders has a link with only 1/k of the uplink's
bandwidth. In a real network, the messages of several senders share the uplink at the same time, as
in `Flows`.
"""

from __future__ import annotations

import numpy as np

from labkit.network.links import Links, Transfers, positions
from labkit.network.network import Network
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers


class FifoLinks(Links):
    """FIFO links, each with the time until which it is busy with earlier messages.

    `send` delivers all messages of a communication round in one call. `depart` and `arrive`
    together do the same as `send`, for one message. `depart` needs only the state of the sender's
    links; `arrive` needs only the state of the receiver's links. Because each method needs the
    links of only one rank, ranks in different processes can each have their own `FifoLinks` object.
    The array `busy` must be in shared memory only for emulated hosts with uplinks. `depart` and
    `arrive` return the same times as `send` if they are called in the order in which the links
    serve messages.

    Args:
        network: The network whose links are modelled, with its bandwidths and latency.
        size: The number of ranks.
        switches: The number of switches that take part in collectives; default: 0.

    Attributes:
        busy: For each link, the time in s at which its last message so far ends, shape (links,).
            The array `busy` may be replaced by an array in shared memory.

    Raises:
        InvalidInput: If the network's hosts, links or slow ranks do not fit the number of ranks.
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
        """Deliver a round's messages; each link serves them by ready time, then by their order.

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
        """Reserve a link per message, update longest times in `slowest`, and return start times."""
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
    """Group array indices by queue place: the first message of each link, the second, and so on."""
    order = np.lexsort((ready, link))
    position = positions(link[order])
    by_turn = order[np.argsort(position, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(position))[:-1])
