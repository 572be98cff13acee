"""Links that serve one message after the other: `Network(sharing="fifo")`.

A message of n bytes occupies each link on its way for n / bandwidth, faster than its own or not.
It starts on a link as soon as it has started on the one before and the link is free (cut-through;
the switches between never block). It moves at the speed of the slowest link on its way and
arrives `latency` after its last byte left. So k senders of a k-th of an uplink's bandwidth keep
it for too long: real links are shared (`Flows`).
"""

from __future__ import annotations

import numpy as np

from labkit.network.links import Links, Transfers, positions
from labkit.network.model import Network
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers


class Queues(Links):
    """Links, and until when each is busy.

    `send` serves a round in one call. `depart` and `arrive` are its two halves for one message:
    the first needs only the state of the sender's links, the second only that of the receiver's,
    so that ranks in different processes each hold `Queues` and no clock is shared but time.
    (What ranks of an emulated host share, its uplink, takes a shared `busy`.) Both give the times
    of `send` where departures and arrivals are asked for in the order in which links serve.

    Attributes: busy: s, shape (links,), may be replaced by an array in shared memory.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        """Raises: InvalidInput, where hosts, links or slow ranks do not fit the size."""
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
        """Deliver the messages of a round; a link serves in order of readiness, then of rows.

        Args: columns of equal length; nbytes: bytes; ready: s, when the source hands it over;
        shared: as of `Uncontended.send`: those that meet wait for each other here.
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
        hops = [(link, at, at + nbytes / self.bandwidth[link], whole) for link, at in served]
        return Transfers(first_byte, start + slowest + way.latency, hops)

    def depart(self, source: int, destination: int, nbytes: float, now: float) -> float:
        """When the first byte of one message has passed the sender's links, in s."""
        start = now
        for link in self._way(source, destination)[0]:
            start = max(start, float(self.busy[link]))
            self.busy[link] = start + nbytes / self.bandwidth[link]
        if self.network.jitter:
            start += float(self.jitters(np.array([source]))[0])
        return start

    def arrive(self, source: int, destination: int, nbytes: float, first_byte: float) -> float:
        """When a message whose first byte left at `first_byte` is delivered, in s."""
        start = first_byte
        _, arrival, bandwidth, latency = self._way(source, destination)
        for link in arrival:
            start = max(start, float(self.busy[link]))
            self.busy[link] = start + nbytes / self.bandwidth[link]
        return start + nbytes / bandwidth + latency

    def _way(self, source: int, destination: int) -> tuple[list[int], list[int], float, float]:
        """Links of departure and of arrival, bandwidth of the slowest, latency."""
        key = (source, destination)
        if key not in self._ways:
            way = self.way(np.array([source]), np.array([destination]))
            departure = [int(link[0]) for link in way.departure if link[0] >= 0]
            arrival = [int(link[0]) for link in way.arrival if link[0] >= 0]
            slowest = float(self.bandwidth[departure + arrival].min())
            self._ways[key] = departure, arrival, slowest, float(np.max(way.latency))
        return self._ways[key]

    def _serve(self, link: Integers, ready: Seconds, nbytes: Seconds, slowest: Seconds) -> Seconds:
        """Book one link for each message; returns starts and raises `slowest` to the durations."""
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
        """Serve messages of which no two want the same link."""
        start = np.maximum(ready, self.busy[link])
        self.busy[link] = start + duration
        return start


def _turns(link: Integers, ready: Seconds) -> list[Integers]:
    """Rows that are served first on their links, then those served second, …"""
    order = np.lexsort((ready, link))
    position = positions(link[order])
    by_turn = order[np.argsort(position, kind="stable")]
    return np.split(by_turn, np.cumsum(np.bincount(position))[:-1])
