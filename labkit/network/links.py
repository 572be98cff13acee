"""The links of a network among so many ranks: their bandwidths, and the way of each message."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network.flows import drained
from labkit.network.model import Network
from labkit.network.random_streams import uniform
from labkit.network.topology import Seconds, Way, topology
from labkit.schedules.round import Integers


class Transfers(NamedTuple):
    """When the messages of a round moved; columns in the order of its rows, in s.

    start: the first byte leaves; delivery: the last has arrived; hops: (link, start, stop, share of
    its bandwidth) of each link on the way, link -1 where a way is shorter.
    """

    start: Seconds
    delivery: Seconds
    hops: list[tuple[Integers, Seconds, Seconds, Seconds]]


class Links:
    """The links of a network among `size` ranks, and the numbers of their messages.

    Args: switches: nodes that take part, numbered after the ranks.

    Attributes: nodes: ranks and switches; names: of the links; bandwidth: bytes/s, shape
    (links,); hops: of the longest way.
    """

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        """Raises: InvalidInput, where hosts, links or slow ranks do not fit the size."""
        absent = [rank for rank in network.slow if rank >= size]
        if absent:
            raise InvalidInput(f"slow ranks {absent}: there are only ranks 0 to {size - 1}")
        self.network = network
        self.size = size
        self._ends: tuple[Integers, Integers] = np.full(1, -1), np.full(1, -1)
        self.nodes = size + switches
        self._topology = topology(network, size, switches)
        self.names = self._topology.names
        self.bandwidth = self._topology.bandwidth
        self.hops = self._topology.hops
        self.numbers: Integers = np.zeros(self.nodes, np.int64)  # messages sent by each

    def way(self, source: Integers, destination: Integers) -> Way:
        """The links of each message, in columns; the same object where messages repeat."""
        if not (
            np.array_equal(self._ends[0], source) and np.array_equal(self._ends[1], destination)
        ):
            self._ends = source, destination
            self._between = self._topology.way(source, destination)
        return self._between

    def route(self, source: Integers, destination: Integers) -> tuple[Integers, Seconds]:
        """The links of each message, shape (messages, hops), and its latency without jitter, s."""
        way = self.way(source, destination)
        columns = [*way.departure, *way.arrival]
        none = [np.full(len(source), -1)] * (self.hops - len(columns))
        latency = np.broadcast_to(np.asarray(way.latency, np.float64), len(source))
        return np.stack([*columns, *none], axis=1), latency

    def jitters(self, source: Integers) -> Seconds:
        """A delay for the next message of each source; a message's number is its source's."""
        if not self.network.jitter:
            return np.zeros(len(source))
        order = np.argsort(source, kind="stable")
        number = np.empty_like(source)
        number[order] = positions(source[order]) + self.numbers[source[order]]
        np.add.at(self.numbers, source, 1)
        return self.network.jitter * uniform(self.network.seed, source, number)


def positions(groups: Integers) -> Integers:
    """Place of each row in its group, rows of a group being adjacent: [5, 5, 7] -> [0, 1, 0]."""
    index = np.arange(len(groups))
    first = np.concatenate([[True], groups[1:] != groups[:-1]])
    return index - np.maximum.accumulate(np.where(first, index, 0))


class Uncontended(Links):
    """Links, of which each carries messages of one round at a time, and until when."""

    def __init__(self, network: Network, size: int, switches: int = 0) -> None:
        """Raises: InvalidInput, where hosts, links or slow ranks do not fit the size."""
        super().__init__(network, size, switches)
        # The last place belongs to no link: -1, where a way is shorter, finds it.
        self._speed = np.append(self.bandwidth, np.inf)
        self._free: Seconds = np.zeros(len(self._speed))
        self._known: tuple[Way | None, bool, Seconds] = None, False, self._speed
        none: Seconds = np.empty(0)
        self._latest: tuple[Way | None, Seconds, Seconds, Seconds] = None, none, none, none

    def send(
        self,
        source: Integers,
        destination: Integers,
        nbytes: Seconds,
        ready: Seconds,
        shared: bool = True,
    ) -> Transfers | None:
        """Deliver the messages of a round; None, where they would meet another's on a link.

        A source's link carries one round after the other: a message leaves when those before it
        have left.

        Args: columns of equal length; nbytes: bytes; ready: s, when the source hands it over;
        shared: messages of the round may meet each other; hops then say no shares.
        """
        way = self.way(source, destination)
        links = [*way.departure, *way.arrival]
        start = np.maximum(ready, self._free[links[0]])
        if self._known[0] is not way:
            meet = bool(np.bincount(np.concatenate(links) + 1)[1:].max(initial=0) > 1)
            self._known = way, meet, self._speed[np.stack(links)].min(axis=0)
        _, meet, rate = self._known
        if (meet and not shared) or any((self._free[link] > start).any() for link in links):
            return None
        if meet:
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

    def _shared(self, way: Way, nbytes: Seconds, start: Seconds) -> Seconds:
        """When messages that share links have drained; as in the round before where it is alike."""
        first = float(start.min())
        known, size, wait, took = self._latest
        if not (
            known is way and np.array_equal(size, nbytes) and np.array_equal(wait, start - first)
        ):
            wait = start - first
            links = np.stack([*way.departure, *way.arrival], axis=1)
            took = drained(links, nbytes, wait, self.bandwidth)
            self._latest = way, nbytes, wait, took
        return first + took
