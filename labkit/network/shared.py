"""Links whose state lies in memory that several processes share, who look at it in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from labkit.network.fifo_links import Queues
from labkit.network.flows import Flows
from labkit.network.links import Links
from labkit.network.model import Network
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers

Message: TypeAlias = tuple[float, int, int, int]  # ticket, source, destination, bytes

MOST = 4096  # flows that are remembered, under way or drained
HEAD = 4  # s of now, number of the next flow, flows under way, whether their rates are known


class SharedLinks(Protocol):
    """What a sender and a receiver ask, in s of a clock that is the same for all processes.

    Attributes: length: floats of the shared memory, 0 at first; version: what was answered about
    deliveries holds as long as this stays.
    """

    length: int

    def attach(self, memory: Seconds) -> None:
        """Use this memory, shape (length,)."""

    @property
    def version(self) -> float: ...

    def depart(self, source: int, destination: int, nbytes: int, turn: int, now: float) -> float:
        """A message is handed over by its source; its ticket, for who receives it.

        Args: turn: of those that leave by one link the lowest goes first; `FREE`: waits for none.
        """

    def room(self, now: float) -> float:
        """When another message can be handed over."""

    def leaves(self, ticket: float, now: float) -> float:
        """When the first byte of the message that this process handed over last leaves."""

    def arrive(self, messages: Sequence[Message], now: float) -> float:
        """When the last of the messages of one round is delivered, if no further ones join."""


def shared_links(network: Network, size: int) -> SharedLinks:
    """The links among `size` ranks, shared as the network says."""
    return _Fifo(network, size) if network.sharing == "fifo" else FlowTable(network, size)


class FlowTable:
    """The flows of all processes, and when the latest of them have drained.

    A flow's ticket is its number. Who looks at the table lets its flows run until then, with the
    rates that they had in between (`Flows`); so it does not matter who looks, nor how often.
    """

    def __init__(self, network: Network, size: int) -> None:
        """Raises: InvalidInput, where hosts, links or slow ranks do not fit the size."""
        self._links = Links(network, size)
        self._columns = 6 + self._links.hops
        self._routes: dict[tuple[int, int], tuple[Integers, float]] = {}
        self.length = HEAD + MOST * self._columns
        self._ahead: dict[int, tuple[int, int]] = {}  # by link: the last two flows from here
        self._latest = -1  # link by which the last one from here left

    def attach(self, memory: Seconds) -> None:
        """Use this memory, shape (length,)."""
        self._head = memory[:HEAD]
        columns = memory[HEAD:].reshape(self._columns, MOST)
        self._drained, self._latency = columns[:2]  # by number modulo MOST
        self._number, self._turn, self._left, self._rate = columns[2:6]  # of those under way
        self._way = columns[6:]  # of the same

    @property
    def version(self) -> float:
        """Changes when a flow joins."""
        return float(self._head[1])

    def depart(self, source: int, destination: int, nbytes: int, turn: int, now: float) -> float:
        """See `SharedLinks`."""
        flows = self._flows(now)
        number = int(self._head[1])
        way, latency = self._route(source, destination)
        flows.start(np.array([number]), way, np.array([turn]), np.array([float(nbytes)]))
        self._head[1] = number + 1
        self._drained[number % MOST], self._latency[number % MOST] = np.inf, latency
        self._keep(flows)
        self._latest = int(way[0, 0])
        self._ahead[self._latest] = self._ahead.get(self._latest, (-1, -1))[1], number
        return float(number)

    def _route(self, source: int, destination: int) -> tuple[Integers, float]:
        """Links of the way, shape (1, hops), and the next message's latency, s."""
        key = source, destination
        if key not in self._routes:
            way, latency = self._links.route(np.array([source]), np.array([destination]))
            self._routes[key] = way, float(latency[0])
        way, constant = self._routes[key]
        return way, constant + float(self._links.jitters(np.array([source]))[0])

    def room(self, now: float) -> float:
        """See `SharedLinks`: when the flow has drained whose place the next one takes."""
        return self._done([int(self._head[1]) - MOST], now)[0]

    def leaves(self, ticket: float, now: float) -> float:
        """See `SharedLinks`: when the one before it on its link has drained."""
        return self._done([self._ahead[self._latest][0]], now)[0]

    def arrive(self, messages: Sequence[Message], now: float) -> float:
        """See `SharedLinks`."""
        numbers = [int(ticket) for ticket, *_ in messages]
        times = self._done(numbers, now)
        latencies = [float(self._latency[number % MOST]) for number in numbers]
        return max((sum(both) for both in zip(times, latencies, strict=True)), default=0.0)

    def _done(self, numbers: Sequence[int], now: float) -> list[float]:
        """When each flow has drained; 0.0 of one that is forgotten, or that never was."""
        known = [number for number in numbers if number >= max(0, self._head[1] - MOST)]
        found = dict.fromkeys(numbers, 0.0)
        found |= {number: float(self._drained[number % MOST]) for number in known}
        if np.inf in found.values():
            flows = self._flows(now)
            found |= {number: float(self._drained[number % MOST]) for number in known}
            if np.inf in found.values():
                flows.find_rates()
                self._keep(flows)
            while np.inf in found.values():
                for number, time in zip(*flows.run(flows.next), strict=True):
                    found[int(number)] = float(time)
        return [found[number] for number in numbers]

    def _flows(self, now: float) -> Flows:
        """Those under way now; when others have drained since somebody looked is remembered."""
        count = int(self._head[2])
        flows = Flows(self._links.bandwidth, self._links.hops, float(self._head[0]))
        flows.start(
            self._number[:count].astype(np.int64),
            self._way[:, :count].T.astype(np.int64),
            self._turn[:count].astype(np.int64),
            self._left[:count].copy(),
        )
        if self._head[3]:
            flows.rate = self._rate[:count].copy()
        numbers, times = flows.run(now)
        self._drained[numbers % MOST] = times
        self._keep(flows)
        return flows

    def _keep(self, flows: Flows) -> None:
        count = len(flows)
        self._head[0], self._head[2] = flows.now, count
        self._number[:count], self._turn[:count] = flows.number, flows.turn
        self._left[:count], self._way[:, :count] = flows.left, flows.way.T
        self._head[3] = flows.rate is not None
        if flows.rate is not None:
            self._rate[:count] = flows.rate


class _Fifo:
    """Links that serve one message after the other: until when each is busy.

    A message's ticket is the time at which its first byte leaves.
    """

    version = 0.0  # what is booked stays

    def __init__(self, network: Network, size: int) -> None:
        self._queues = Queues(network, size)
        self.length = len(self._queues.busy)

    def attach(self, memory: Seconds) -> None:
        self._queues.busy = memory

    def depart(self, source: int, destination: int, nbytes: int, turn: int, now: float) -> float:
        return self._queues.depart(source, destination, nbytes, now)

    def room(self, now: float) -> float:
        return now

    def leaves(self, ticket: float, now: float) -> float:
        return ticket

    def arrive(self, messages: Sequence[Message], now: float) -> float:
        times = [
            self._queues.arrive(source, destination, nbytes, first_byte)
            for first_byte, source, destination, nbytes in sorted(messages)
        ]
        return max(times, default=0.0)
