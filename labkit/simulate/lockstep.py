"""Ranks that go through rounds, round by round: a round is a few steps over its columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import Network, Queues, Uncontended
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round
from labkit.simulate.trace import Entry


class Tally:
    """What ranks have sent, and links carried.

    Attributes: messages, sent: number and bytes, shape (size,); carried: bytes, shape (links,).
    """

    def __init__(self, size: int, links: int) -> None:
        self.messages: Seconds = np.zeros(size)
        self.sent: Seconds = np.zeros(size)
        self.carried: Seconds = np.zeros(links)

    def add(self, source: Integers, nbytes: Seconds, way: Iterable[Integers]) -> None:
        """Messages, in columns, with the links of their ways (-1: none)."""
        self.messages += np.bincount(source, minlength=len(self.messages))
        self.sent += np.bincount(source, nbytes, len(self.sent))
        for link in way:
            exists = link >= 0
            self.carried += np.bincount(link[exists], nbytes[exists], len(self.carried))


class Lockstep:
    """Clocks of all ranks, and the links between them, after so many rounds.

    On links that serve one message after the other this is exact, those of an earlier round going
    first. On links that are shared it is exact as long as no two messages meet on one, in a round
    or across rounds; `run` says whether that was so.

    Attributes: clock: s, shape (size,); links; tally; log: of the rounds; segments: none.
    """

    def __init__(
        self, network: Network, size: int, gamma: float, compute: ArrayLike, trace: bool
    ) -> None:
        slowness = np.array([network.compute_factor(rank, 0) for rank in range(size)])
        fifo = network.sharing == "fifo"
        self.links: Queues | Uncontended = (Queues if fifo else Uncontended)(network, size)
        self.gamma = gamma * slowness
        self.clock: Seconds = np.asarray(compute, np.float64) * slowness
        self.tally = Tally(size, len(self.links.names))
        self.log: list[Entry] = []
        self.segments: list[Segment] = []
        self._trace = trace

    def run(self, rounds: Iterable[Round], chunk: float) -> bool:
        """Carry out rounds of chunks of so many bytes, until messages meet; whether none did."""
        return all(self._step(each, np.multiply(each.span, chunk)) for each in rounds)

    def _step(self, each: Round, nbytes: Seconds) -> bool:
        ready = self.clock[each.source]
        transfers = self.links.send(each.source, each.destination, nbytes, ready)
        if transfers is None:
            return False
        np.maximum.at(self.clock, each.destination, transfers.delivery)
        if self.gamma.any():
            added = np.where(each.reduce, nbytes, 0.0)
            self.clock += self.gamma * np.bincount(each.destination, added, len(self.clock))
        self.tally.add(each.source, nbytes, (hop[0] for hop in transfers.hops))
        if self._trace:
            self.log.append(Entry(each, nbytes, ready, transfers))
        return True
