"""The simulator of collectives, which computes times from a schedule and a network."""

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
from labkit.simulate.events import Events, Lockstep, Trace


@dataclass(frozen=True, eq=False)
class Simulation:
    """The timing and the traffic of a schedule on a network.

    Args:
        finish: Time in s at which each rank finishes, shape (size,).
        messages, sent: Number and total bytes of the messages that each rank sends, shape (size,).
        links: Names of the links.
        carried: Total bytes on each link, shape (links,).
        occupied: Time in s for which each link would be busy if it always ran at its full rate,
            shape (links,).
        trace: Record of all messages, if a trace was requested.
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
        """Time at which the last rank finishes, in s."""
        return float(self.finish.max())

    def utilisation(self, bins: int = 100) -> tuple[Seconds, Seconds]:
        """Return the utilisation of each link over time, in equal time intervals.

        Returns:
            Two arrays; the first has the edges of the intervals in s, shape (bins + 1,). The second
            array has the mean fraction of each link's bandwidth that is in use, shape (links,
            bins).

        Raises:
            InvalidInput: If the simulation has no trace.
        """
        trace = self.trace
        if trace is None:
            raise InvalidInput(
                "utilisation over time needs a trace of the messages; call simulate(trace=True)"
            )
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
    """Simulate a schedule: a rank starts a round once it has all messages of its previous round.

    A rank sends its messages when it starts the round. The rank ends the round once it has received
    and added its last message. The link of a rank carries the messages of its rounds one round
    after another. `Network.sharing` defines how simultaneous messages share a link. The simulation
    treats all chunks as equal in size.

    Args:
        schedule: Name of a schedule, or a function from the number of ranks to rounds.
            `Network.schedule` adapts a named schedule to the network.
        size: Number of ranks.
        nbytes: Size of each rank's buffer in bytes.
        network: Name of a network, or a `Network`.
        gamma: Time in s to add one byte.
        compute: Time in s before each rank starts, as one value or with shape (size,). Each time is
            multiplied by the compute factor of the rank.
        trace: Whether to record every message.

    Raises:
        InvalidInput: If a name or number is invalid.
    """
    network = Network.named(network) if isinstance(network, str) else network
    if size < 1 or nbytes < 0 or gamma < 0:
        raise InvalidInput(
            f"size={size}, nbytes={nbytes}, gamma={gamma} is impossible; give one rank or "
            f"more, and no negative numbers"
        )
    rounds = network.schedule(schedule) if isinstance(schedule, str) else schedule
    # The schedule is called twice, because a second call is cheaper than storing millions of
    # messages.
    chunk = nbytes / _count_chunks(rounds, size)
    options = network, size, gamma, compute, trace, count_switches(rounds, size)
    simulator: Lockstep | Events = Lockstep(*options)
    if not simulator.run(rounds(size), chunk):
        simulator = Events(*options)
        simulator.run(rounds(size), chunk)
    bandwidth, tally = simulator.links.bandwidth, simulator.tally
    recorded = Trace.of(simulator.log, simulator.segments, bandwidth) if trace else None
    counts = tally.messages[:size], tally.sent[:size], simulator.links.names, tally.carried
    return Simulation(simulator.clock[:size], *counts, tally.carried / bandwidth, recorded)


def _count_chunks(rounds: Schedule, size: int) -> int:
    """Count chunks as `count_chunks` does, but cache the result for a `Collective`."""
    function, arguments = rounds, dict[str, Any]()
    if isinstance(rounds, partial):
        function, arguments = rounds.func, rounds.keywords
    if isinstance(function, Collective) and all(isinstance(v, int) for v in arguments.values()):
        return _chunks_of(function, size, **arguments)
    return count_chunks(rounds(size))


@lru_cache(maxsize=128)
def _chunks_of(function: Collective[...], size: int, **arguments: int) -> int:
    return count_chunks(function(size, **arguments))
