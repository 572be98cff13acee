"""Ranks that go through rounds, round by round: a round is a few steps over its columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import Network, Queues, Uncontended
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round
from labkit.simulate.trace import Entry


class Tally:
    """What ranks have sent, and links carried.

    Attributes: messages, sent: number and bytes, shape (nodes,); carried: bytes, shape (links,).
    """

    def __init__(self, nodes: int, links: int) -> None:
        self.messages: Seconds = np.zeros(nodes)
        self.sent: Seconds = np.zeros(nodes)
        self.carried: Seconds = np.zeros(links)

    def add(
        self, source: Integers, nbytes: Seconds, way: Sequence[Integers], times: int = 1
    ) -> None:
        """So many rounds of messages, in columns, with the links of their ways (-1: none)."""
        np.add.at(self.messages, source, times)
        np.add.at(self.sent, source, nbytes)
        for link in way:
            exists = link >= 0
            np.add.at(self.carried, link[exists], nbytes[exists])


def begin(
    network: Network, size: int, switches: int, gamma: float, compute: ArrayLike
) -> tuple[Seconds, Seconds]:
    """Seconds to add a byte, and to the first round, of each node; switches take none."""
    slowness = np.array([network.compute_factor(rank, 0) for rank in range(size)])
    clock = np.broadcast_to(np.asarray(compute, np.float64) * slowness, size)
    none = np.zeros(switches)
    return np.append(gamma * slowness, none), np.append(clock, none)


class Lockstep:
    """Clocks of all ranks, and the links between them, after so many rounds.

    On links that serve one message after the other this is exact, those of an earlier round going
    first. On links that are shared it is exact as long as no messages of two rounds meet on one;
    `run` says whether that was so. With a trace, those of one round may not meet either.

    Attributes: clock: s, shape (nodes,); links; tally; log: of the rounds; segments: none.
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
        links = Queues if fifo else Uncontended
        self.links: Queues | Uncontended = links(network, size, switches)
        self.gamma, self.clock = begin(network, size, switches, gamma, compute)
        self.tally = Tally(self.links.nodes, len(self.links.names))
        self._same: tuple[Integers, Sequence[Integers]]  # source and ways of the latest rounds
        self._bytes: Seconds
        self._times = 0  # how many they are
        self.log: list[Entry] = []
        self.segments: list[Segment] = []
        self._trace = trace

    def run(self, rounds: Iterable[Round], chunk: float) -> bool:
        """Carry out rounds of chunks of so many bytes, until messages meet; whether none did."""
        done = all(self._step(each, np.multiply(each.span, chunk)) for each in rounds)
        self._flush()
        return done

    def _step(self, each: Round, nbytes: Seconds) -> bool:
        ready = self.clock[each.source]
        given = each.source, each.destination, nbytes, ready
        transfers = self.links.send(*given, shared=not self._trace)
        if transfers is None:
            return False
        np.maximum.at(self.clock, each.destination, transfers.delivery)
        if self.gamma.any():
            added = np.where(each.reduce, nbytes, 0.0)
            np.add.at(self.clock, each.destination, self.gamma[each.destination] * added)
        self._count(each.source, nbytes, [hop[0] for hop in transfers.hops])
        if self._trace:
            self.log.append(Entry(each, nbytes, ready, transfers))
        return True

    def _count(self, source: Integers, nbytes: Seconds, way: Sequence[Integers]) -> None:
        """Rounds that go the same ways, of which a ring has thousands, are counted in one go."""
        if self._times and all(one is other for one, other in zip(way, self._same[1], strict=True)):
            self._bytes += nbytes
            self._times += 1
            return
        self._flush()
        self._same, self._bytes, self._times = (source, way), nbytes.copy(), 1

    def _flush(self) -> None:
        if self._times:
            self.tally.add(self._same[0], self._bytes, self._same[1], self._times)
        self._times = 0
