"""Event-driven simulation: ranks progress at their own pace, and their messages share links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import Flows, Links, Network, Transfers
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round
from labkit.simulate.lockstep import TrafficCounter, begin
from labkit.simulate.trace import RoundTrace

ROW = 32  # low bits of a flow's number are its row; high bits are its round


class _ActiveRound:
    """The state of a round that some ranks have not finished, per rank and per message."""

    def __init__(self, step: Round, chunk: float, size: int) -> None:
        self.round = step
        self.nbytes: Seconds = np.multiply(step.span, chunk, dtype=np.float64)
        added = np.where(step.reduce, self.nbytes, 0.0)
        self.added = np.bincount(step.destination, added, size)  # bytes that each rank adds
        # Messages that each rank waits for.
        self.missing = np.bincount(step.destination, minlength=size)
        self.latest: Seconds = np.zeros(size)  # latest delivery to each rank, in s
        self.ready, self.latency, self.delivery = (np.zeros(len(step)) for _ in range(3))

    def arrive(self, rows: Integers, times: Seconds) -> Integers:
        """Record that the last byte of these messages was sent; return the receiving ranks."""
        ranks = self.round.destination[rows]
        self.delivery[rows] = times + self.latency[rows]
        np.maximum.at(self.latest, ranks, self.delivery[rows])
        self.missing -= np.bincount(ranks, minlength=len(self.missing))
        return np.unique(ranks)


class Events:
    """A simulation with two kinds of events: a rank begins its next round, or flows finish.

    A flow is a message while it travels over the links of its route. A rank starts a round and
    submits its messages once it has received and added all messages of the previous round. The link
    of a rank carries its rounds one after another; the messages of one round share the link. A
    round is read from the schedule when its first rank begins it, and is deleted after its last
    rank has ended it.

    The attributes are those of `Lockstep`; here, `segments` contains the rates of all flows over
    time.
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
        self.tally = TrafficCounter(self.links.nodes, len(self.links.names))
        self._flows = Flows(self.links.bandwidth, self.links.hops, log=trace)
        self._place: Integers = np.zeros(self.links.nodes, np.int64)  # round of each rank
        self._wake = self.clock.copy()  # when each rank's round starts, in s; inf: it has begun
        self._open: dict[int, _ActiveRound] = {}
        self._trace, self._traced = trace, list[_ActiveRound]()

    @property
    def segments(self) -> list[Segment]:
        return self._flows.segments

    @property
    def log(self) -> list[RoundTrace]:
        """Record of the simulated rounds; an empty list if no trace was requested."""
        # A flow starts with its first segment; a segment is a time interval in which rates are
        # constant.
        starts = [active.ready.copy() for active in self._traced]
        for segment in reversed(self.segments):
            for number in segment.number.tolist():
                starts[number >> ROW][number & (1 << ROW) - 1] = segment.start
        return [
            RoundTrace(
                active.round, active.nbytes, active.ready, Transfers(start, active.delivery, [])
            )
            for active, start in zip(self._traced, starts, strict=True)
        ]

    def run(self, rounds: Iterable[Round], chunk: float) -> bool:
        """Simulate rounds with chunks of `chunk` bytes; always return True: links may be shared."""
        source = enumerate(_ActiveRound(step, chunk, len(self.clock)) for step in rounds)
        while True:
            wake, drain = float(self._wake.min()), self._flows.next
            if min(wake, drain) == np.inf:
                return True
            if drain <= wake:
                self._deliver()
                continue
            self._flows.run(wake)
            self._begin(np.flatnonzero(self._wake <= wake), source)

    def _begin(self, ranks: Integers, source: Iterator[tuple[int, _ActiveRound]]) -> None:
        """Begin the current round of each given rank and submit the messages of this rank."""
        self._wake[ranks] = np.inf
        place = self._place[ranks]  # a copy, because `_end` advances some ranks
        for number in np.unique(place).tolist():
            while number not in self._open and (following := next(source, None)):
                self._open[following[0]] = following[1]
                if self._trace:
                    self._traced.append(following[1])
            if active := self._open.get(number):
                current = ranks[place == number]
                self._send(number, active, current)
                self._end(active, current)
        for number in [number for number in self._open if number < self._place.min()]:
            del self._open[number]

    def _send(self, number: int, active: _ActiveRound, ranks: Integers) -> None:
        sends = np.zeros(len(self.clock), np.bool_)
        sends[ranks] = True
        rows = np.flatnonzero(sends[active.round.source])
        if not len(rows):
            return
        source, nbytes = active.round.source[rows], active.nbytes[rows]
        way, latency = self.links.route(source, active.round.destination[rows])
        active.latency[rows] = latency + self.links.jitters(source)
        active.ready[rows] = self._flows.now
        self._flows.start((number << ROW) + rows, way, np.full(len(rows), number), nbytes)
        self.tally.add(source, nbytes, list(way.T))

    def _deliver(self) -> None:
        """Process the deliveries of the flows that finish next."""
        numbers, times = self._flows.run(self._flows.next)
        for number in np.unique(numbers >> ROW).tolist():
            in_round = numbers >> ROW == number
            active = self._open[number]
            ranks = active.arrive(numbers[in_round] - (number << ROW), times[in_round])
            # A rank that has not begun this round is not advanced here; `_begin` does it later.
            self._end(active, ranks[(self._place[ranks] == number) & (self._wake[ranks] == np.inf)])

    def _end(self, active: _ActiveRound, ranks: Integers) -> None:
        """Advance those of the given ranks that have received all messages to the next round."""
        done = ranks[active.missing[ranks] == 0]
        added = self.gamma[done] * active.added[done]
        self.clock[done] = np.maximum(self.clock[done], active.latest[done]) + added
        self._wake[done] = self.clock[done]
        self._place[done] += 1
