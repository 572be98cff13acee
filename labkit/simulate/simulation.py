"""The simulator: a schedule, a network, and no processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.network import Links, Network, Transfers
from labkit.network.topology import Seconds
from labkit.schedules.round import Integers, Round, Schedule, count_chunks, join


class Entry(NamedTuple):
    """A round as it went: columns in the order of its rows."""

    round: Round
    nbytes: Seconds
    ready: Seconds
    transfers: Transfers


@dataclass(frozen=True, eq=False)
class Trace:
    """Messages in columns, in order of rounds and rows; then links, a row a message and link.

    Args: round: its number, from 0; messages: source, destination, chunk, span, reduce; nbytes:
    bytes; ready: the source hands it over; start: its first byte has left the source; delivery:
    its last byte has arrived (s); link: number of a link; link_start, link_stop: from when until
    when it was occupied (s).
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

    @classmethod
    def of(cls, log: list[Entry], bandwidth: Seconds) -> Trace:
        """Put the rounds of a simulation together."""
        none: Seconds = np.empty(0)
        hops = [(*hop, entry.nbytes) for entry in log for hop in entry.transfers.hops]
        link = np.concatenate([none.astype(np.int64), *(hop[0] for hop in hops)])
        start = np.concatenate([none, *(hop[1] for hop in hops)])
        nbytes = np.concatenate([none, *(hop[2] for hop in hops)])
        exists = link >= 0
        link, start, nbytes = link[exists], start[exists], nbytes[exists]
        return cls(
            round=np.repeat(np.arange(len(log)), [len(entry.round) for entry in log]),
            messages=join([Round([], [], reduce=[]), *(entry.round for entry in log)]),
            nbytes=np.concatenate([none, *(entry.nbytes for entry in log)]),
            ready=np.concatenate([none, *(entry.ready for entry in log)]),
            start=np.concatenate([none, *(entry.transfers.first_byte for entry in log)]),
            delivery=np.concatenate([none, *(entry.transfers.delivery for entry in log)]),
            link=link,
            link_start=start,
            link_stop=start + nbytes / bandwidth[link],
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a schedule does on a network.

    Args: finish: when each rank is done, shape (size,), s; messages, sent: number and bytes that
    each rank sent, shape (size,); links: their names; occupied: for how long each was, shape
    (links,), s; trace: every message, where asked for.
    """

    finish: Seconds
    messages: Seconds
    sent: Seconds
    links: list[str]
    occupied: Seconds
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return float(self.finish.max())

    def utilisation(self, bins: int = 100) -> tuple[Seconds, Seconds]:
        """Share of each stretch of time for which each link is occupied: the burst.

        Returns: edges of the stretches, shape (bins + 1,), s; shares, shape (links, bins).
        Raises: InvalidInput, for a simulation without trace.
        """
        trace = self.trace
        if trace is None:
            raise InvalidInput("utilisation over time needs the messages: simulate(trace=True)")
        edges = np.linspace(0.0, self.seconds, bins + 1)
        occupied = np.zeros((len(self.links), bins + 1))
        for column, edge in enumerate(edges):
            before = np.clip(edge - trace.link_start, 0.0, trace.link_stop - trace.link_start)
            np.add.at(occupied[:, column], trace.link, before)
        shares = np.diff(occupied, axis=1)
        width = np.broadcast_to(np.diff(edges), shares.shape)
        return edges, np.divide(shares, width, out=np.zeros_like(shares), where=width > 0)


def simulate(
    schedule: str | Schedule,
    size: int,
    nbytes: float,
    network: str | Network,
    *,
    gamma: float = 0.0,
    compute: ArrayLike = 0.0,
    trace: bool = False,
) -> Simulation:
    """Time of a schedule: each rank starts a round when it has received all of the one before.

    A rank's messages of a round leave when it starts the round; it ends the round when the last
    message for it has been delivered and it has added what it received. On a link the messages
    of an earlier round go first. Chunks count as equal.

    Args: schedule: a name, laid out on the network (`Network.schedule`), or size -> rounds;
    size: number of ranks; nbytes: bytes of the buffer; gamma: s to add one byte; compute: s
    before each rank starts, one value or shape (size,), times its compute factor; trace: keep
    every message.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
    network = Network.named(network) if isinstance(network, str) else network
    if size < 1 or nbytes < 0 or gamma < 0:
        raise InvalidInput(
            f"size={size}, nbytes={nbytes}, gamma={gamma}: give one rank or more, and nothing "
            f"negative"
        )
    rounds = network.schedule(schedule) if isinstance(schedule, str) else schedule
    world = _World(network, size, gamma, compute)
    # A schedule is a pure function: to ask it twice is cheaper than to keep millions of rows.
    chunk = nbytes / count_chunks(rounds(size))
    log = []
    for each in rounds(size):
        entry = world.step(each, chunk)
        if trace:
            log.append(entry)
    return world.outcome(Trace.of(log, world.links.bandwidth) if trace else None)


class _World:
    """Clocks of all ranks, and the links between them."""

    def __init__(self, network: Network, size: int, gamma: float, compute: ArrayLike) -> None:
        slowness = np.array([network.compute_factor(rank, 0) for rank in range(size)])
        self.links = Links(network, size)
        self.gamma = gamma * slowness
        self.clock: Seconds = np.asarray(compute, np.float64) * slowness
        self.messages: Seconds = np.zeros(size)
        self.sent: Seconds = np.zeros(size)
        self.carried = np.zeros(len(self.links.names))  # bytes over each link

    def step(self, each: Round, chunk: float) -> Entry:
        nbytes = np.multiply(each.span, chunk, dtype=np.float64)
        ready = self.clock[each.source]
        transfers = self.links.send(each.source, each.destination, nbytes, ready)
        np.maximum.at(self.clock, each.destination, transfers.delivery)
        if self.gamma.any():
            self.clock += self.gamma * self._total(
                each.destination, np.where(each.reduce, nbytes, 0.0)
            )
        self.messages += np.bincount(each.source, minlength=len(self.clock))
        self.sent += self._total(each.source, nbytes)
        for link, _ in transfers.hops:
            exists = link >= 0
            self.carried += np.bincount(link[exists], nbytes[exists], len(self.carried))
        return Entry(each, nbytes, ready, transfers)

    def _total(self, ranks: Integers, of: Seconds) -> Seconds:
        return np.bincount(ranks, of, len(self.clock)).astype(np.float64, copy=False)

    def outcome(self, trace: Trace | None) -> Simulation:
        occupied = self.carried / self.links.bandwidth
        return Simulation(self.clock, self.messages, self.sent, self.links.names, occupied, trace)
