"""What carries messages between places on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from labkit.common.state import record
from labkit.network import FREE, Flows, Links, Network, Queues
from labkit.schedules.round import Integers


@record()
class Event(NamedTuple):
    """Something that will happen, as data: what, and to whom."""

    what: str
    given: tuple[Any, ...]


# Objects that are made anew, and which of their attributes are state.
Changing: TypeAlias = Sequence[tuple[object, Sequence[str]]]
At: TypeAlias = Callable[[float, Event], None]  # lets something happen later


class Carrier(Protocol):
    """What carries messages between places."""

    @property
    def next(self) -> float:
        """When something happens on the links; inf: never."""

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        """Let time pass; what was delivered, and when."""

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        """A message from one place to another is handed over."""

    @property
    def changing(self) -> Changing:
        """What messages under way change."""


def carrier(network: Network | None, places: int, at: At) -> Carrier:
    """What carries messages on a network among so many places; `at` lets things happen later."""
    if network is None:
        return _Free(at)
    return _Queued(network, places, at) if network.sharing == "fifo" else _Fair(network, places)


class _Free:
    """No network: messages are there at once."""

    next = np.inf
    changing: Changing = ()

    def __init__(self, at: At) -> None:
        self._at = at

    def run(self, until: float) -> Sequence[tuple[float, Event]]:
        return ()

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        self._at(now, arrive)


class _Queued(_Free):
    """Links that serve one message after the other."""

    def __init__(self, network: Network, places: int, at: At) -> None:
        super().__init__(at)
        self._queues = Queues(network, places)
        self.changing = [(self._queues, ("numbers", "busy"))]

    def start(self, ends: tuple[int, int], nbytes: int, now: float, arrive: Event) -> None:
        first = self._queues.depart(*ends, nbytes, now)
        self._at(self._queues.arrive(*ends, nbytes, first), arrive)


class _Fair:
    """Links that messages share."""

    def __init__(self, network: Network, places: int) -> None:
        self._links = Links(network, places)
        self._flows = Flows(self._links.bandwidth, self._links.hops)
        self._ways: dict[tuple[int, int], tuple[Integers, float]] = {}
        # What is handed over at one moment begins together: rates are found once.
        self._handed: list[tuple[int, Integers, float]] = []
        self._under_way: dict[int, tuple[float, Event]] = {}
        self._drained: list[tuple[float, Event]] = []
        self._number = 0  # of the next message

    @property
    def changing(self) -> Changing:
        return [
            (self, ("_under_way", "_handed", "_drained", "_number")),
            (self._links, ("numbers",)),
            (self._flows, ("now", "number", "way", "turn", "left", "rate", "_wait")),
        ]

    @property
    def next(self) -> float:
        self._begin()
        return self._flows.now if self._drained else self._flows.next

    def run(self, until: float) -> list[tuple[float, Event]]:
        self._pass(until)
        found, self._drained = self._drained, []
        return found

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
        own, delay = self._ways[ends]
        number, self._number = self._number, self._number + 1
        self._under_way[number] = delay + float(self._links.jitters(source)[0]), arrive
        self._handed.append((number, own, float(nbytes)))
