"""Which ranks there are: all that mpiexec started, some of them, or this one alone."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from labkit.common.errors import LabkitError
from labkit.communicator.clock import WALL, Clock
from labkit.communicator.communicator import LIMIT, Communicator
from labkit.communicator.membership import SPARE, Membership
from labkit.communicator.status_board import leave_without_it
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

    Raises:
        LabkitError: Slurm has started several tasks, and none knows of the others.
    """
    from mpi4py import MPI

    # Where a task's PMI is missing, MPI takes it for a world of one, without an error.
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 and MPI.COMM_WORLD.size == 1 and "PMIX_RANK" not in os.environ:
        raise LabkitError(
            f"srun has started {tasks} tasks, and each is an MPI world of its own: the step runs "
            "without PMIx; use srun --mpi=pmix (srun --mpi=list shows what this site has), or "
            "mpiexec in the allocation"
        )
    if ranks is None:
        return Communicator(MPI.COMM_WORLD, limit, network, clock=clock)
    group = MPI.COMM_WORLD.group.Incl(list(ranks))
    return Communicator(MPI.COMM_WORLD.Create_group(group), limit, network, clock=clock)


def join(
    ranks: Sequence[int],
    spares: int,
    limit: float = LIMIT,
    network: str | Network | None = None,
    clock: Clock = WALL,
) -> Communicator | None:
    """The Communicator of some ranks, of which the last are spares: they wait here for a place.

    Args:
        ranks: world ranks that take part; only these call this.
        spares: how many of them.
        limit, network, clock: as for `world`.

    Returns:
        None for a spare that nobody needed.
    """
    from mpi4py import MPI

    if not spares:
        return world(ranks, limit, network, clock)
    comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(ranks)))
    crew = Membership(comm, comm.size - spares, clock)
    found: list[Communicator] = []

    def begin(working: MPI.Intracomm) -> None:
        found[:] = [Communicator(working, limit, network, clock=clock, crew=crew)]

    def abandon() -> None:
        for each in found:
            each.board.abandon()
        found.clear()

    working = crew.working()
    if crew.number != SPARE:
        begin(working)
    while crew.number == SPARE:
        if not crew.is_called():
            return None
        atexit.register(leave_without_it)
        crew.has_joined = True
        crew.fill(begin, abandon)
    return found[0]


def alone(clock: Clock = WALL) -> Communicator:
    """The Communicator of this rank by itself."""
    from mpi4py import MPI

    return Communicator(MPI.COMM_SELF, clock=clock)
