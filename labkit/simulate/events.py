"""Ranks that go through rounds each at its own pace, and whose messages share links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import Flows, Links, Network, Transfers
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round
from labkit.simulate.lockstep import Tally, begin
from labkit.simulate.trace import Entry

ROW = 32  # bits of a flow's number that are its row; the others are its round


class _Open:
    """A round in which some ranks still are: what has come of it, by rank and by row."""

    def __init__(self, each: Round, chunk: float, size: int) -> None:
        self.round = each
        self.nbytes: Seconds = np.multiply(each.span, chunk, dtype=np.float64)
        added = np.where(each.reduce, self.nbytes, 0.0)
        self.added = np.bincount(each.destination, added, size)  # bytes that each rank adds up
        self.missing = np.bincount(each.destination, minlength=size)  # messages still to come
        self.latest: Seconds = np.zeros(size)  # delivery so far
        self.ready, self.latency, self.delivery = (np.zeros(len(each)) for _ in range(3))

    def arrive(self, rows: Integers, left: Seconds) -> Integers:
        """Rows whose last byte has left; the ranks that they go to."""
        ranks = self.round.destination[rows]
        self.delivery[rows] = left + self.latency[rows]
        np.maximum.at(self.latest, ranks, self.delivery[rows])
        self.missing -= np.bincount(ranks, minlength=len(self.missing))
        return np.unique(ranks)


class Events:
    """Events in order of time: ranks begin their next round, or flows have drained.

    A rank begins a round, and hands its messages over, when all of the one before is delivered
    and added up; its link carries its rounds one after the other, and each round's messages share
    it. Rounds are drawn when the first rank comes to them, and forgotten behind the last.

    Attributes: as of `Lockstep`; segments: what flowed when.
    """

    def __init__(
        self,
        network: Network,
        size: int,
        gamma: float,
        compute: ArrayLike,
        trace: bool,
        switches: int = 0,
    ) -> None:
        self.links = Links(network, size, switches)
        self.gamma, self.clock = begin(network, size, switches, gamma, compute)
        self.tally = Tally(self.links.nodes, len(self.links.names))
        self._flows = Flows(self.links.bandwidth, self.links.hops, log=trace)
        self._place: Integers = np.zeros(
            self.links.nodes, np.int64
        )  # number of the round of each rank
        self._wake = self.clock.copy()  # when it begins that round; inf: it has begun
        self._open: dict[int, _Open] = {}
        self._trace, self._kept = trace, list[_Open]()

    @property
    def segments(self) -> list[Segment]:
        return self._flows.segments

    @property
    def log(self) -> list[Entry]:
        """The rounds, where a trace was asked for."""
        # Whoever's turn it is flows at once: a flow starts when its first segment does.
        starts = [each.ready.copy() for each in self._kept]
        for segment in reversed(self.segments):
            for number in segment.number.tolist():
                starts[number >> ROW][number & (1 << ROW) - 1] = segment.start
        return [
            Entry(each.round, each.nbytes, each.ready, Transfers(start, each.delivery, []))
            for each, start in zip(self._kept, starts, strict=True)
        ]

    def run(self, rounds: Iterable[Round], chunk: float) -> bool:
        """Carry out rounds of chunks of so many bytes, whatever meets; true."""
        source = enumerate(_Open(each, chunk, len(self.clock)) for each in rounds)
        while True:
            wake, drain = float(self._wake.min()), self._flows.next
            if min(wake, drain) == np.inf:
                return True
            if drain <= wake:
                self._deliver()
                continue
            self._flows.run(wake)
            self._begin(np.flatnonzero(self._wake <= wake), source)

    def _begin(self, ranks: Integers, source: Iterator[tuple[int, _Open]]) -> None:
        """Ranks come to their rounds."""
        self._wake[ranks] = np.inf
        place = self._place[ranks]  # before some go on
        for number in np.unique(place).tolist():
            while number not in self._open and (drawn := next(source, None)):
                self._open[drawn[0]] = drawn[1]
                if self._trace:
                    self._kept.append(drawn[1])
            if each := self._open.get(number):
                those = ranks[place == number]
                self._send(number, each, those)
                self._end(each, those)
        for number in [number for number in self._open if number < self._place.min()]:
            del self._open[number]

    def _send(self, number: int, each: _Open, ranks: Integers) -> None:
        sends = np.zeros(len(self.clock), np.bool_)
        sends[ranks] = True
        rows = np.flatnonzero(sends[each.round.source])
        if not len(rows):
            return
        source, nbytes = each.round.source[rows], each.nbytes[rows]
        way, latency = self.links.route(source, each.round.destination[rows])
        each.latency[rows] = latency + self.links.jitters(source)
        each.ready[rows] = self._flows.now
        self._flows.start((number << ROW) + rows, way, np.full(len(rows), number), nbytes)
        self.tally.add(source, nbytes, list(way.T))

    def _deliver(self) -> None:
        """The next flows have drained."""
        numbers, times = self._flows.run(self._flows.next)
        for number in np.unique(numbers >> ROW).tolist():
            own = numbers >> ROW == number
            each = self._open[number]
            ranks = each.arrive(numbers[own] - (number << ROW), times[own])
            # Who has not come there yet ends the round when it has.
            self._end(each, ranks[(self._place[ranks] == number) & (self._wake[ranks] == np.inf)])

    def _end(self, each: _Open, ranks: Integers) -> None:
        """Of these ranks in a round, those that miss nothing go on to the next."""
        done = ranks[each.missing[ranks] == 0]
        added = self.gamma[done] * each.added[done]
        self.clock[done] = np.maximum(self.clock[done], each.latest[done]) + added
        self._wake[done] = self.clock[done]
        self._place[done] += 1
