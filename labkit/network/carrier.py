"""Message transport in a discrete-event simulation; messages may start at any simulated time."""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from labkit.network.flows import FREE, Flows
from labkit.network.links import FifoLinks, Links
from labkit.network.network import Network


class Delivery(NamedTuple):
    """A message of the simulation whose delivery time has been computed.

    Attributes:
        number: The number by which the simulation identifies the message.
        start: The time in s at which the message's first byte leaves the sender.
        delivery: The time in s at which the message's last byte arrives at the receiver.
    """

    number: int
    start: float
    delivery: float


class Carrier(Protocol):
    """The interface of message transport in a simulation.

    The simulation must process its own events and those of the message transport together, in order
    of time.
    """

    @property
    def next(self) -> float:
        """The time of the next transport event, in s; infinite if no message is in flight."""

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        """Start the transport of a message.

        Args:
            number: The number by which the simulation identifies the message.
            source, destination: The ranks of sender and receiver.
            nbytes: Bytes of the message.
            now: The current simulated time, in s.
        """

    def step(self) -> list[Delivery]:
        """Process the next transport event; return messages whose delivery time is now computed."""


def carrier(network: Network, size: int) -> Carrier:
    """Return a transport for `size` ranks with fair or FIFO link sharing, as `network` defines."""
    return _Fifo(network, size) if network.sharing == "fifo" else _Fair(network, size)


class _Fair:
    """Message transport with max-min fair flows (`Flows`); its events are the ends of flows."""

    def __init__(self, network: Network, size: int) -> None:
        self._links = Links(network, size)
        self._flows = Flows(self._links.bandwidth, self._links.hops)
        # `_sent` maps the number of a message to its start time and latency, in s.
        self._sent: dict[int, tuple[float, float]] = {}

    @property
    def next(self) -> float:
        return self._flows.next

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        self._flows.run(now)
        ends = np.array([source]), np.array([destination])
        way, latency = self._links.route(*ends)
        self._sent[number] = now, float((latency + self._links.jitters(ends[0]))[0])
        self._flows.start(np.array([number]), way, np.array([FREE]), np.array([nbytes]))

    def step(self) -> list[Delivery]:
        numbers, times = self._flows.run(self.next)
        return [
            Delivery(number, start, time + latency)
            for number, time in zip(numbers.tolist(), times.tolist(), strict=True)
            for start, latency in [self._sent.pop(number)]
        ]


class _Fifo:
    """Message transport with FIFO links (`FifoLinks`); its events are departures of messages."""

    def __init__(self, network: Network, size: int) -> None:
        self._queues = FifoLinks(network, size)
        self._departures: list[tuple[float, int, tuple[int, int, int, float]]] = []
        self._count = 0

    @property
    def next(self) -> float:
        return self._departures[0][0] if self._departures else np.inf

    def start(self, number: int, source: int, destination: int, nbytes: float, now: float) -> None:
        first_byte = self._queues.depart(source, destination, nbytes, now)
        # If messages depart at equal times, the message that was started first is processed first.
        message = number, source, destination, nbytes
        heapq.heappush(self._departures, (first_byte, self._count, message))
        self._count += 1

    def step(self) -> list[Delivery]:
        first_byte, _, (number, source, destination, nbytes) = heapq.heappop(self._departures)
        delivery = self._queues.arrive(source, destination, nbytes, first_byte)
        return [Delivery(number, first_byte, delivery)]
