"""The simulator: a schedule, a network, and no processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.schedules import Collective, count_switches
from labkit.schedules.round import Schedule, count_chunks
from labkit.simulate.events import Events
from labkit.simulate.lockstep import Lockstep
from labkit.simulate.trace import Trace


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a schedule does on a network.

    Args: finish: when each rank is done, shape (size,), s; messages, sent: number and bytes that
    each rank sent, shape (size,); links: their names; carried: bytes, shape (links,); occupied: for
    how long each was, counted at its full rate, shape (links,), s; trace: every message, where
    asked for.
    """

    finish: Seconds
    messages: Seconds
    sent: Seconds
    links: list[str]
    carried: Seconds
    occupied: Seconds
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        """When the last rank is done."""
        return float(self.finish.max())

    def utilisation(self, bins: int = 100) -> tuple[Seconds, Seconds]:
        """Share of what each link could carry in each stretch of time that it carried: the burst.

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
            np.add.at(occupied[:, column], trace.link, before * trace.link_share)
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
    message for it has been delivered and it has added what it received. Its link carries its
    rounds one after the other; messages that meet on a link share it (`Network.sharing`). Chunks
    count as equal.

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
    # A schedule is a pure function: to ask it twice is cheaper than to keep millions of rows.
    chunk = nbytes / _count_chunks(rounds, size)
    given = network, size, gamma, compute, trace, count_switches(rounds, size)
    world: Lockstep | Events = Lockstep(*given)
    if not world.run(rounds(size), chunk):
        world = Events(*given)
        world.run(rounds(size), chunk)
    bandwidth, tally = world.links.bandwidth, world.tally
    kept = Trace.of(world.log, world.segments, bandwidth) if trace else None
    counts = tally.messages[:size], tally.sent[:size], world.links.names, tally.carried
    return Simulation(world.clock[:size], *counts, tally.carried / bandwidth, kept)


def _count_chunks(rounds: Schedule, size: int) -> int:
    """As `count_chunks`; in a sweep over networks or bytes a collective is asked once."""
    drawn, given = rounds, dict[str, Any]()
    if isinstance(rounds, partial):
        drawn, given = rounds.func, rounds.keywords
    if isinstance(drawn, Collective) and all(isinstance(each, int) for each in given.values()):
        return _chunks_of(drawn, size, **given)
    return count_chunks(rounds(size))


@lru_cache(maxsize=128)
def _chunks_of(drawn: Collective[...], size: int, **given: int) -> int:
    return count_chunks(drawn(size, **given))
