"""Transport of messages between simulated ranks, timed on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from labkit.common.state import record
from labkit.network import FREE, FifoLinks, Flows, Links, Network
from labkit.schedules.round import Integers


@record()
class Event(NamedTuple):
    """A future event as data: the name of a runtime's method, and the arguments of its call."""

    what: str
    given: tuple[Any, ...]


# For each object that exists again after a restart: the object, with the names of the attributes
# that a checkpoint restores.
StateAttributes: TypeAlias = Sequence[tuple[object, Sequence[str]]]
# Adds an event at a time in s to the runtime's queue.
Schedule: TypeAlias = Callable[[float, Event], None]


class MessageCarrier(Protocol):
    """A transport of messages between simulated ranks, which determines when they arrive."""

    @property
    def next(self) -> float:
        """The time in s of the next event on the network links; infinity if no event is pending."""

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        """Advance the time to `until`, in s; return (arrival time, event) for each sent message."""

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        """Start a message between two ranks; the event `arrive` takes place at its arrival."""

    @property
    def state_attributes(self) -> StateAttributes:
        """The objects whose attributes change while messages are transferred, with these names."""


def carrier(network: Network | None, places: int, schedule: Schedule) -> MessageCarrier:
    """Return a message transport for a network; if `network` is None, messages have no delay."""
    if network is None:
        return _Free(schedule)
    return (
        _Queued(network, places, schedule) if network.sharing == "fifo" else _Fair(network, places)
    )


class _Free:
    """A message transport without a network model, in which each message arrives at once."""

    next = np.inf
    state_attributes: StateAttributes = ()

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        return ()

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        self._schedule(now, arrive)


class _Queued(_Free):
    """A message transport over FIFO links, each of which transfers one message at a time."""

    def __init__(self, network: Network, places: int, schedule: Schedule) -> None:
        super().__init__(schedule)
        self._queues = FifoLinks(network, places)
        self.state_attributes = [(self._queues, ("numbers", "busy"))]

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        first = self._queues.depart(*ends, nbytes, now)
        self._schedule(self._queues.arrive(*ends, nbytes, first), arrive)


class _Fair:
    """A message transport over links whose bandwidth is shared by concurrent messages."""

    def __init__(self, network: Network, places: int) -> None:
        self._links = Links(network, places)
        self._flows = Flows(self._links.bandwidth, self._links.hops)
        self._ways: dict[tuple[int, int], tuple[Integers, float]] = {}
        # Messages that start at the same time are added to the links together, so that transfer
        # rates are computed only once.
        self._handed: list[tuple[int, Integers, float]] = []
        self._under_way: dict[int, tuple[float, Event]] = {}
        self._drained: list[tuple[float, Event]] = []
        self._number = 0  # number that the next message receives

    @property
    def state_attributes(self) -> StateAttributes:
        return [
            (self, ("_under_way", "_handed", "_drained", "_number")),
            (self._links, ("numbers",)),
            (self._flows, ("now", "number", "way", "turn", "remaining", "rate", "_wait")),
        ]

    @property
    def next(self) -> float:
        self._begin()
        return self._flows.now if self._drained else self._flows.next

    def run(self, until: float) -> list[tuple[float, Event]]:
        self._pass(until)
        deliveries, self._drained = self._drained, []
        return deliveries

    def _begin(self) -> None:
        if self._handed:
            numbers, ways, nbytes = zip(*self._handed, strict=True)
            turns = np.full(len(numbers), FREE)
            self._flows.start(np.array(numbers), np.stack(ways), turns, np.array(nbytes))
            self._handed = []

    def _pass(self, until: float) -> None:
        self._begin()
        for number, moment in zip(*self._flows.run(until), strict=True):
            latency, arrive = self._under_way.pop(int(number))
            self._drained.append((float(moment) + latency, arrive))

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        if now > self._flows.now:
            self._pass(now)
        source = np.array([ends[0]])
        if ends not in self._ways:
            way, latency = self._links.route(source, np.array([ends[1]]))
            self._ways[ends] = way[0], float(latency[0])
        route, delay = self._ways[ends]
        number, self._number = self._number, self._number + 1
        self._under_way[number] = delay + float(self._links.jitters(source)[0]), arrive
        self._handed.append((number, route, float(nbytes)))
