"""Rounds in which no link carries two messages at once: each has its way for itself."""

from __future__ import annotations

import numpy as np

from labkit.network.links import Links, Transfers
from labkit.network.model import Network
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers


class Uncontended(Links):
    """Links, and until when each was last in use; a round is one step over columns."""

    def __init__(self, network: Network, size: int) -> None:
        """Raises: InvalidInput, where hosts, links or slow ranks do not fit the size."""
        super().__init__(network, size)
        # The last place belongs to no link: -1, where a way is shorter, finds it.
        self._speed = np.append(self.bandwidth, np.inf)
        self._free: Seconds = np.zeros(len(self._speed))

    def send(
        self, source: Integers, destination: Integers, nbytes: Seconds, ready: Seconds
    ) -> Transfers | None:
        """Deliver the messages of a round; None, where messages would meet on a link.

        A source's link carries one round after the other: a message leaves when those before it
        have left.

        Args: columns of equal length; nbytes: bytes; ready: s, when the source hands it over.
        """
        way = self.way(source, destination)
        links = [*way.departure, *way.arrival]
        start = np.maximum(ready, self._free[links[0]])
        rate = self._speed[links[0]]
        if np.bincount(np.concatenate(links) + 1)[1:].max(initial=0) > 1:
            return None
        for link in links:
            if (self._free[link] > start).any():
                return None
            rate = np.minimum(rate, self._speed[link])
        stop = start + nbytes / rate
        for link in links:
            self._free[link] = stop
        self._free[-1] = 0.0
        hops = [(link, start, stop, rate / self._speed[link]) for link in links]
        return Transfers(start, stop + way.latency + self.jitters(source), hops)
