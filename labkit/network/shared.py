"""Network links whose state is in shared memory, where several processes update it in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np

from labkit.network.flows import Flows
from labkit.network.links import FifoLinks, Links
from labkit.network.network import Network
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers

# The type `Message` contains the ticket, source, destination and number of bytes of a message.
Message: TypeAlias = tuple[float, int, int, int]

MAX_FLOWS = 4096  # The table contains at most MAX_FLOWS flows (message transfers), active or ended.
# The constant HEAD is the count of numbers before the table of flows. Two numbers state the time
# and whether the transfer rates are valid. The table's head also contains the flow count and the
# next flow's number.
HEAD = 4


class SharedLinks(Protocol):
    """The interface through which sending and receiving processes use shared links.

    All times are in seconds of a clock that all processes share.

    Attributes:
        length: Number of floats in the shared memory, all of which must be zero at the start.
        version: A number that changes whenever earlier delivery times become invalid.
    """

    length: int

    def attach(self, memory: Seconds) -> None:
        """Store the state of the links in `memory`, a shared-memory array of shape (length,)."""

    @property
    def version(self) -> float: ...

    def depart(self, source: int, destination: int, nbytes: int, turn: int, now: float) -> float:
        """Start a message, and return its ticket (an identifier) for the receiver.

        Args:
            source, destination: The ranks of sender and receiver.
            nbytes: Bytes of the message.
            turn: The turn number of the message. On the sender's outgoing link, messages with lower
                turn numbers go first. With the turn `FREE`, a message never waits for other
                messages.
            now: The current time, in s.
        """

    def room(self, now: float) -> float:
        """Return the time from which the links can accept another message."""

    def leaves(self, ticket: float, now: float) -> float:
        """Return the time at which the first byte of this process's last message leaves."""

    def arrive(self, messages: Sequence[Message], now: float) -> float:
        """Return the arrival time of the last of the messages, if no further message starts."""


def shared_links(network: Network, size: int) -> SharedLinks:
    """Return links among `size` ranks in shared memory, with sharing as in `network.sharing`."""
    return _Fifo(network, size) if network.sharing == "fifo" else FlowTable(network, size)


class FlowTable:
    """A table in shared memory: active flows of all processes, and end times of recent flows.

    The ticket of a flow is its number, by which the receiver identifies the flow. Each access to
    the table first advances all flows to the current time at their current rates (`Flows`). Neither
    the frequency of accesses nor the accessing process changes the state of the table.

    Raises:
        InvalidInput: If the network's hosts, links or slow ranks do not fit the number of ranks.
    """

    def __init__(self, network: Network, size: int) -> None:
        self._links = Links(network, size)
        self._columns = 6 + self._links.hops
        self._routes: dict[tuple[int, int], tuple[Integers, float]] = {}
        self.length = HEAD + MAX_FLOWS * self._columns
        # For each outgoing link, `_last_flows` contains the numbers of the last two flows that this
        # process started. The attribute `_latest` is the number of the first link of the last flow
        # that this process started.
        self._last_flows: dict[int, tuple[int, int]] = {}
        self._latest = -1

    def attach(self, memory: Seconds) -> None:
        """Store the state of the flows in `memory`, a shared-memory array of shape (length,)."""
        self._head = memory[:HEAD]
        columns = memory[HEAD:].reshape(self._columns, MAX_FLOWS)
        # The index into the arrays `_ends` and `_latency` is the flow number modulo MAX_FLOWS.
        self._ends, self._latency = columns[:2]
        # The arrays `_number`, `_turn`, `_remaining` and `_rate` have one element per active flow.
        # Each column of `_way` contains the link numbers of one active flow's route.
        self._number, self._turn, self._remaining, self._rate = columns[2:6]
        self._way = columns[6:]

    @property
    def version(self) -> float:
        """The number of the next flow, which changes whenever a flow starts."""
        return float(self._head[1])

    def depart(self, source: int, destination: int, nbytes: int, turn: int, now: float) -> float:
        """Start a flow for a message, see `SharedLinks.depart`."""
        flows = self._flows(now)
        number = int(self._head[1])
        way, latency = self._route(source, destination)
        flows.start(np.array([number]), way, np.array([turn]), np.array([float(nbytes)]))
        self._head[1] = number + 1
        self._ends[number % MAX_FLOWS], self._latency[number % MAX_FLOWS] = np.inf, latency
        self._store(flows)
        self._latest = int(way[0, 0])
        self._last_flows[self._latest] = self._last_flows.get(self._latest, (-1, -1))[1], number
        return float(number)

    def _route(self, source: int, destination: int) -> tuple[Integers, float]:
        """Return a route's link numbers, shape (1, hops), and the next message's latency in s."""
        key = source, destination
        if key not in self._routes:
            way, latency = self._links.route(np.array([source]), np.array([destination]))
            self._routes[key] = way, float(latency[0])
        way, constant = self._routes[key]
        return way, constant + float(self._links.jitters(np.array([source]))[0])

    def room(self, now: float) -> float:
        """Return the end time of the oldest stored flow, whose table column is reused next."""
        return self._end_times([int(self._head[1]) - MAX_FLOWS], now)[0]

    def leaves(self, ticket: float, now: float) -> float:
        """Return the end time of the flow before this process's last flow on the same link."""
        return self._end_times([self._last_flows[self._latest][0]], now)[0]

    def arrive(self, messages: Sequence[Message], now: float) -> float:
        """Return the arrival time of the last of the messages, see `SharedLinks.arrive`."""
        numbers = [int(ticket) for ticket, *_ in messages]
        times = self._end_times(numbers, now)
        latencies = [float(self._latency[number % MAX_FLOWS]) for number in numbers]
        return max((sum(both) for both in zip(times, latencies, strict=True)), default=0.0)

    def _end_times(self, numbers: Sequence[int], now: float) -> list[float]:
        """Return each flow's end time, or 0.0 if the table no longer contains the flow."""
        known = [number for number in numbers if number >= max(0, self._head[1] - MAX_FLOWS)]
        ends = dict.fromkeys(numbers, 0.0)
        ends |= {number: float(self._ends[number % MAX_FLOWS]) for number in known}
        if np.inf in ends.values():
            flows = self._flows(now)
            ends |= {number: float(self._ends[number % MAX_FLOWS]) for number in known}
            if np.inf in ends.values():
                flows.find_rates()
                self._store(flows)
            while np.inf in ends.values():
                for number, time in zip(*flows.run(flows.next), strict=True):
                    ends[int(number)] = float(time)
        return [ends[number] for number in numbers]

    def _flows(self, now: float) -> Flows:
        """Advance all flows to `now`, store their end times, and return the active flows."""
        count = int(self._head[2])
        flows = Flows(self._links.bandwidth, self._links.hops, float(self._head[0]))
        flows.start(
            self._number[:count].astype(np.int64),
            self._way[:, :count].T.astype(np.int64),
            self._turn[:count].astype(np.int64),
            self._remaining[:count].copy(),
        )
        if self._head[3]:
            flows.rate = self._rate[:count].copy()
        numbers, times = flows.run(now)
        self._ends[numbers % MAX_FLOWS] = times
        self._store(flows)
        return flows

    def _store(self, flows: Flows) -> None:
        count = len(flows)
        self._head[0], self._head[2] = flows.now, count
        self._number[:count], self._turn[:count] = flows.number, flows.turn
        self._remaining[:count], self._way[:, :count] = flows.remaining, flows.way.T
        self._head[3] = flows.rate is not None
        if flows.rate is not None:
            self._rate[:count] = flows.rate


class _Fifo:
    """FIFO links, whose state (the time until which each link is busy) is in shared memory.

    The ticket of a message tells the receiver when the first byte leaves the sender.
    """

    # The attribute `version` is constant in a FIFO network. A new message never changes the
    # delivery time of an earlier message.
    version = 0.0

    def __init__(self, network: Network, size: int) -> None:
        self._queues = FifoLinks(network, size)
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
