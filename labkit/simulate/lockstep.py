"""Lockstep simulation: round by round, with a few array operations per round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from labkit.network import FifoLinks, Network, Uncontended
from labkit.network.flows import Segment
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round
from labkit.simulate.trace import RoundTrace


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
        """Count `times` equal rounds of messages; `way` lists links hop by hop (-1: no link)."""
        np.add.at(self.messages, source, times)
        np.add.at(self.sent, source, nbytes)
        for link in way:
            exists = link >= 0
            np.add.at(self.carried, link[exists], nbytes[exists])


def begin(
    network: Network, size: int, switches: int, gamma: float, compute: ArrayLike
) -> tuple[Seconds, Seconds]:
    """Return each node's time to add a byte and its start time, in s; for switches both are 0."""
    slowness = np.array([network.compute_factor(rank, 0) for rank in range(size)])
    clock = np.broadcast_to(np.asarray(compute, np.float64) * slowness, size)
    none = np.zeros(switches)
    return np.append(gamma * slowness, none), np.append(clock, none)


class Lockstep:
    """Simulation of clocks of ranks and of the links between them, which advances round by round.

    If links serve one message at a time, the result is exact, because messages of earlier rounds go
    first. If messages share links, it is exact unless messages of two rounds use a link at the same
    time; `run` reports this case. If a trace is recorded, the result is exact only if messages of
    one round do not share a link either.

    Attributes:
        clock: Current time of each node in s, shape (nodes,).
        links: Model of the links; each link serves one message at a time, or messages never queue.
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
        self._same: tuple[Integers, Sequence[Integers]]  # sources and links of the last rounds
        self._bytes: Seconds
        self._times = 0  # number of consecutive rounds with the same links as `_same`
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
        """Count consecutive rounds with equal routes together; a ring has thousands of them."""
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
