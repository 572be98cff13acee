"""Which ranks there are: all that mpiexec started, some of them, or this one alone."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.communicator.clock import WALL, Clock
from labkit.communicator.communicator import LIMIT, Communicator
from labkit.network import Network


def world(
    ranks: Sequence[int] | None = None,
    limit: float = LIMIT,
    network: str | Network | None = None,
    clock: Clock = WALL,
) -> Communicator:
    """The Communicator of all ranks that mpiexec started, or of some of them.

    Args:
        ranks: world ranks that take part; only these call this. Default: all.
        limit: seconds after which a wait raises.
        network: a network to emulate.
        clock: by which ranks wait and take times.
    """
    from mpi4py import MPI

    if ranks is None:
        return Communicator(MPI.COMM_WORLD, limit, network, clock=clock)
    group = MPI.COMM_WORLD.group.Incl(list(ranks))
    return Communicator(MPI.COMM_WORLD.Create_group(group), limit, network, clock=clock)


def alone(clock: Clock = WALL) -> Communicator:
    """The Communicator of this rank by itself."""
    from mpi4py import MPI

    return Communicator(MPI.COMM_SELF, clock=clock)
