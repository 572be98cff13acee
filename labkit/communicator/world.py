"""Which ranks there are: all that mpiexec started, some of them, or this one alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from labkit.common.errors import LabkitError
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


def alone(clock: Clock = WALL) -> Communicator:
    """The Communicator of this rank by itself."""
    from mpi4py import MPI

    return Communicator(MPI.COMM_SELF, clock=clock)
