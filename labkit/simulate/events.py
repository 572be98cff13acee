"""Event-driven simulation: ranks progress at their own pace, and their messages share links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import FifoLinks, Flows, Links, Network, Transfers, Uncontended
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round, join


class RoundTrace(NamedTuple):
    """A simulated round; its columns have the order of the messages in the round."""

    round: Round
    nbytes: Seconds
    ready: Seconds
    transfers: Transfers


@dataclass(frozen=True, eq=False)
class Trace:
    """A table of messages, sorted by round and row, and a table of the intervals of link use.

    Args:
        round: Number of the round of each message, from 0.
        messages: Source, destination, chunk, span and reduce of each message.
        nbytes: Bytes of each message.
        ready: Time at which the source submits the message, in s.
        start: Time at which the first byte leaves the source, in s.
        delivery: Time at which the last byte arrives, in s.
        link: For each interval of link use, the number of the link.
        link_start, link_stop: Start and end of an interval of link use, in s. In the interval, the
            link carries one message at a constant rate.
        link_share: Rate of the message in the interval, as a fraction of the link's bandwidth.
    """

    round: Integers
    messages: Round
    nbytes: Seconds
    ready: Seconds
    start: Seconds
    delivery: Seconds
    link: Integers
    link_start: Seconds
    link_stop: Seconds
    link_share: Seconds

    @classmethod
    def of(cls, log: list[RoundTrace], segments: list[Segment], bandwidth: Seconds) -> Trace:
        """Build the trace from simulated rounds, and from flow segments if transfer rates vary."""
        none: Seconds = np.empty(0)
        hops = [hop for entry in log for hop in entry.transfers.hops]
        hops += _stretches(segments, bandwidth)
        link = np.concatenate([none.astype(np.int64), *(hop[0] for hop in hops)])
        exists = link >= 0
        start, stop, share = (
            np.concatenate([none, *(hop[column] for hop in hops)])[exists] for column in (1, 2, 3)
        )
        return cls(
            round=np.repeat(np.arange(len(log)), [len(entry.round) for entry in log]),
            messages=join([Round([], [], reduce=[]), *(entry.round for entry in log)]),
            nbytes=np.concatenate([none, *(entry.nbytes for entry in log)]),
            ready=np.concatenate([none, *(entry.ready for entry in log)]),
            start=np.concatenate([none, *(entry.transfers.start for entry in log)]),
            delivery=np.concatenate([none, *(entry.transfers.delivery for entry in log)]),
            link=link[exists],
            link_start=start,
            link_stop=stop,
            link_share=share,
        )


def _stretches(
    segments: Iterable[Segment], bandwidth: Seconds
) -> list[tuple[Integers, Seconds, Seconds, Seconds]]:
    """Return flow segments per link; merge consecutive segments of a flow with equal rates."""
    parts = list(segments)
    if not parts:
        return []
    counts = [len(part.number) for part in parts]
    number = np.concatenate([part.number for part in parts])
    rate = np.concatenate([part.rate for part in parts])
    start, stop = (
        np.repeat([getattr(part, name) for part in parts], counts) for name in ("start", "stop")
    )
    order = np.argsort(number, kind="stable")
    number, rate, start, stop = number[order], rate[order], start[order], stop[order]
    same = (number[1:] == number[:-1]) & (rate[1:] == rate[:-1]) & (start[1:] == stop[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~same]))
    last = np.append(first[1:], len(number)) - 1
    way = np.concatenate([part.way for part in parts])[order][first]
    speed = np.append(bandwidth, np.inf)
    return [(link, start[first], stop[last], rate[first] / speed[link]) for link in way.T]


class TrafficCounter:
    """Counters of the messages and bytes of ranks and links.

    Attributes:
        messages, sent: Number and total bytes of the messages that each node sent, shape (nodes,).
        carried: Total bytes on each link, shape (links,).
    """

    def __init__(self, nodes: int, links: int) -> None:
        self.messages: Seconds = np.zeros(nodes)
        self.sent: Seconds = np.zeros(nodes)
        self.carried: Seconds = np.zeros(links)

    def add(
        self, source: Integers, nbytes: Seconds, way: Sequence[Integers], times: int = 1
    ) -> None:
        """Count messages of `times` equal rounds with `nbytes` in total; link -1 means no link."""
        np.add.at(self.messages, source, times)
        np.add.at(self.sent, source, nbytes)
        for link in way:
            exists = link >= 0
            np.add.at(self.carried, link[exists], nbytes[exists])


def begin(
    network: Network, size: int, switches: int, gamma: float, compute: ArrayLike
) -> tuple[Seconds, Seconds]:
    """Return each node's time per added byte and start time, in s (0 for switches)."""
    slowness = np.array([network.compute_factor(rank, 0) for rank in range(size)])
    clock = np.broadcast_to(np.asarray(compute, np.float64) * slowness, size)
    none = np.zeros(switches)
    return np.append(gamma * slowness, none), np.append(clock, none)


class Lockstep:
    """A simulation of the ranks' clocks and their links, which advances round by round.

    The result is exact if links serve one message at a time. On a link, messages of earlier rounds
    go first. If messages share links, the result is exact if `run` returns True. `run` returns
    False if messages of two rounds use one link at the same time. If a trace is recorded, links
    must carry one message at a time. Otherwise the result with a trace is not exact.

    Attributes:
        clock: Current time of each node in s, shape (nodes,).
        links: Model of the links: `FifoLinks` serve one message at a time; `Uncontended` links
            never queue messages.
        tally: The counters of messages and bytes.
        log: Record of the simulated rounds; empty if no trace was requested.
        segments: Empty list; in `Events`, this list contains the rates of flows.
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
        fifo = network.sharing == "fifo"
        links = FifoLinks if fifo else Uncontended
        self.links: FifoLinks | Uncontended = links(network, size, switches)
        self.gamma, self.clock = begin(network, size, switches, gamma, compute)
        self.tally = TrafficCounter(self.links.nodes, len(self.links.names))
        # The attribute `_same` holds the source ranks and the links of the last rounds.
        self._same: tuple[Integers, Sequence[Integers]]
        self._bytes: Seconds
        # The attribute `_times` counts consecutive rounds with the same links as `_same`.
        self._times = 0
        self.log: list[RoundTrace] = []
        self.segments: list[Segment] = []
        self._trace = trace

    def run(self, rounds: Iterable[Round], chunk: float) -> bool:
        """Simulate rounds with chunks of `chunk` bytes; return False if two rounds share a link."""
        done = all(self._step(step, np.multiply(step.span, chunk)) for step in rounds)
        self._flush()
        return done

    def _step(self, step: Round, nbytes: Seconds) -> bool:
        ready = self.clock[step.source]
        columns = step.source, step.destination, nbytes, ready
        transfers = self.links.send(*columns, shared=not self._trace)
        if transfers is None:
            return False
        np.maximum.at(self.clock, step.destination, transfers.delivery)
        if self.gamma.any():
            added = np.where(step.reduce, nbytes, 0.0)
            np.add.at(self.clock, step.destination, self.gamma[step.destination] * added)
        self._count(step.source, nbytes, [hop[0] for hop in transfers.hops])
        if self._trace:
            self.log.append(RoundTrace(step, nbytes, ready, transfers))
        return True

    def _count(self, source: Integers, nbytes: Seconds, way: Sequence[Integers]) -> None:
        """Count consecutive rounds with equal routes together, as a ring has thousands of them."""
        if self._times and all(new is old for new, old in zip(way, self._same[1], strict=True)):
            self._bytes += nbytes
            self._times += 1
            return
        self._flush()
        self._same, self._bytes, self._times = (source, way), nbytes.copy(), 1

    def _flush(self) -> None:
        if self._times:
            self.tally.add(self._same[0], self._bytes, self._same[1], self._times)
        self._times = 0


# The low 32 bits of a flow number are the row of the message. The high bits identify the
# communication round of the message.
ROW = 32


class _ActiveRound:
    """The state of a round that some ranks have not finished, per rank and per message."""

    def __init__(self, step: Round, chunk: float, size: int) -> None:
        self.round = step
        self.nbytes: Seconds = np.multiply(step.span, chunk, dtype=np.float64)
        added = np.where(step.reduce, self.nbytes, 0.0)
        # The array `added` holds the bytes that each rank adds to its buffer in the round.
        self.added = np.bincount(step.destination, added, size)
        # The array `missing` counts the messages that each rank still waits for.
        self.missing = np.bincount(step.destination, minlength=size)
        # The array `latest` holds the time in s of the latest delivery to each rank.
        self.latest: Seconds = np.zeros(size)
        self.ready, self.latency, self.delivery = (np.zeros(len(step)) for _ in range(3))

    def arrive(self, rows: Integers, times: Seconds) -> Integers:
        """Record when the messages in `rows` were sent completely; return the receiving ranks."""
        ranks = self.round.destination[rows]
        self.delivery[rows] = times + self.latency[rows]
        np.maximum.at(self.latest, ranks, self.delivery[rows])
        self.missing -= np.bincount(ranks, minlength=len(self.missing))
        return np.unique(ranks)


class Events:
    """A simulation with two kinds of events: a rank begins its next round, or flows finish.

    A flow is a message while it travels over the links of its route. A rank starts a round after it
    has received all messages of the previous round. A rank adds received values before the rank
    starts the next round. At the start of a round, a rank submits its messages. The link of a rank
    carries its rounds one after another. The messages of one round share the link. A round is read
    from the schedule when its first rank begins the round. A round is deleted after its last rank
    has ended the round.

    The attributes are those of `Lockstep`, but `segments` contains the rates of all flows over
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
        # The array `_place` holds the number of each rank's current round.
        self._place: Integers = np.zeros(self.links.nodes, np.int64)
        # For each rank, `_wake` holds the start of its round in s. After the round has started,
        # `_wake` is infinity.
        self._wake = self.clock.copy()
        self._open: dict[int, _ActiveRound] = {}
        self._trace, self._traced = trace, list[_ActiveRound]()

    @property
    def segments(self) -> list[Segment]:
        return self._flows.segments

    @property
    def log(self) -> list[RoundTrace]:
        """Record of the simulated rounds; an empty list if no trace was requested."""
        # A message's flow starts with its first segment; a segment is a time interval with constant
        # rates.
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
        """Simulate rounds of `chunk`-byte chunks; return True, as shared links are allowed."""
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
        """Begin the current round of each given rank and submit the rank's messages."""
        self._wake[ranks] = np.inf
        # The array `place` is a copy, because `_end` changes `self._place` of some ranks.
        place = self._place[ranks]
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
            # If a rank has not begun a round, `_begin` later advances the rank to the next round.
            self._end(active, ranks[(self._place[ranks] == number) & (self._wake[ranks] == np.inf)])

    def _end(self, active: _ActiveRound, ranks: Integers) -> None:
        """Move a rank of `ranks` to the next round if the rank has received all its messages."""
        done = ranks[active.missing[ranks] == 0]
        added = self.gamma[done] * active.added[done]
        self.clock[done] = np.maximum(self.clock[done], active.latest[done]) + added
        self._wake[done] = self.clock[done]
        self._place[done] += 1
