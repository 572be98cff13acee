"""Messages that start at any time, one by one: who carries them in a simulation of events."""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from labkit.network.fifo_links import Queues
from labkit.network.flows import FREE, Flows
from labkit.network.links import Links
from labkit.network.model import Network


class Delivered(NamedTuple):
    """A message's number, when its first byte left and when its last arrives, s."""

    number: int
    start: float
    delivery: float


class Carrier(Protocol):
    """Carries messages; its events are taken in order of time, between those of who sends."""

    @property
    def next(self) -> float:
        """When its next event is, s; inf where nothing is under way."""

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        """A message is handed over."""

    def step(self) -> list[Delivered]:
        """Take the next event; the messages of which the delivery is known with it."""


def carrier(network: Network, size: int) -> Carrier:
    """Who carries messages among `size` ranks, sharing links as the network says."""
    return _Fifo(network, size) if network.sharing == "fifo" else _Fair(network, size)


class _Fair:
    """Flows that share links (`Flows`): an event is that some have drained."""

    def __init__(self, network: Network, size: int) -> None:
        self._links = Links(network, size)
        self._flows = Flows(self._links.bandwidth, self._links.hops)
        self._sent: dict[int, tuple[float, float]] = {}  # start and latency of who is under way

    @property
    def next(self) -> float:
        return self._flows.next

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        self._flows.run(now)
        ends = np.array([source]), np.array([destination])
        way, latency = self._links.route(*ends)
        self._sent[number] = now, float((latency + self._links.jitters(ends[0]))[0])
        self._flows.start(np.array([number]), way, np.array([FREE]), np.array([nbytes]))

    def step(self) -> list[Delivered]:
        numbers, times = self._flows.run(self.next)
        return [
            Delivered(number, start, time + latency)
            for number, time in zip(numbers.tolist(), times.tolist(), strict=True)
            for start, latency in [self._sent.pop(number)]
        ]


class _Fifo:
    """Links that serve in turn (`Queues`): an event is that a first byte has left its source."""

    def __init__(self, network: Network, size: int) -> None:
        self._queues = Queues(network, size)
        self._left: list[tuple[float, int, tuple[int, int, int, float]]] = []
        self._count = 0

    @property
    def next(self) -> float:
        return self._left[0][0] if self._left else np.inf

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        first_byte = self._queues.depart(source, destination, nbytes, now)
        # Equal times are served in the order in which they became known.
        message = number, source, destination, nbytes
        heapq.heappush(self._left, (first_byte, self._count, message))
        self._count += 1

    def step(self) -> list[Delivered]:
        first_byte, _, (number, one, other, nbytes) = heapq.heappop(self._left)
        delivery = self._queues.arrive(one, other, nbytes, first_byte)
        return [Delivered(number, first_byte, delivery)]
