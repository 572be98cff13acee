"""Detection of dead ranks with MPI's User-Level Failure Mitigation (ULFM).

Source: W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of
MPI communication capability, 2013, International Journal of High Performance Computing
Applications 27.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.communicator.clock import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

UNUSED_TAG = 1 << 30  # no message has this tag; a probe with it detects failures
NAMING_TIMEOUT = 1.0  # maximum seconds from the first sign of a death until MPI reports the rank


class FailureGuard:
    """A context manager that checks for dead ranks if MPI raises an error inside its block.

    Args:
        check: A function that raises `RankDied` if a rank is dead.
        clock: The clock that measures the waits between repeated checks.
    """

    def __init__(self, check: Callable[[], None], clock: Clock) -> None:
        self._check, self._clock = check, clock

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, where: object) -> None:
        if kind is not None:
            from mpi4py import MPI

            end = self._clock.now() + NAMING_TIMEOUT
            # The check for dead ranks is repeated, because a receive from a dead rank may fail
            # before MPI reports the death.
            while issubclass(kind, MPI.Exception) and outlives() and self._clock.now() < end:
                self._check()
                self._clock.sleep(1e-3)


def outlives() -> bool:
    """Return whether MPI runs with ULFM, so that ranks survive the death of other ranks."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI's spelling


def is_broken(comm: MPI.Intracomm) -> bool:
    """Return whether a rank of the communicator is dead, or a survivor has revoked it.

    The probe that detects a death or revocation also lets the MPI library make progress.
    """
    from mpi4py import MPI

    try:
        comm.Iprobe(MPI.ANY_SOURCE, UNUSED_TAG)
    except MPI.Exception as error:
        if error.Get_error_class() in (
            MPI.ERR_PROC_FAILED,
            MPI.ERR_PROC_FAILED_PENDING,
            MPI.ERR_REVOKED,
        ):
            return True
        raise
    return False


def dead_ranks(comm: MPI.Intracomm, clock: Clock) -> list[int]:
    """Return the dead ranks that this rank has detected so far in a broken communicator."""
    from mpi4py import MPI

    end = clock.now() + NAMING_TIMEOUT
    while True:
        failed = comm.Get_failed()
        if failed.size or clock.now() > end:
            return MPI.Group.Translate_ranks(failed, None, comm.group)
        MPI.COMM_SELF.Iprobe()  # lets MPI make progress; a probe on `comm` would raise
        clock.sleep(1e-3)


def agree_all(comm: MPI.Intracomm, succeeded: bool) -> bool:
    """Return whether all ranks are alive and report success; every rank gets the same answer."""
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(succeeded)))
    except MPI.Exception:
        return False
