"""Deaths of ranks, where MPI outlives them (ULFM): how they are noticed, and who is gone.

Source: W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of MPI
communication capability, 2013, International Journal of High Performance Computing Applications 27.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from labkit.communicator.clock import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

NOBODYS = 1 << 30  # a tag without messages: of one that is there MPI says only that it is
NAMED = 1.0  # seconds that the library gets to say who is gone, where it seems that somebody is


class FailureGuard:
    """A context that asks, whenever MPI raises in it, whether a death is the reason.

    Args:
        ask: raises `RankDied` if one is.
        clock: by which it waits for an answer.
    """

    def __init__(self, ask: Callable[[], None], clock: Clock) -> None:
        self._ask, self._clock = ask, clock

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, where: object) -> None:
        if kind is not None:
            from mpi4py import MPI

            end = self._clock.now() + NAMED
            # A message from who is gone may fail before the library knows of the death.
            while issubclass(kind, MPI.Exception) and outlives() and self._clock.now() < end:
                self._ask()
                self._clock.sleep(1e-3)


def outlives() -> bool:
    """Whether ranks were started so that MPI outlives the death of some."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - its own spelling


def is_broken(comm: MPI.Intracomm) -> bool:
    """Whether a rank of it is gone, or one that lives has noticed that; the library gets a turn."""
    from mpi4py import MPI

    try:
        comm.Iprobe(MPI.ANY_SOURCE, NOBODYS)
    except MPI.Exception as error:
        if error.Get_error_class() in (
            MPI.ERR_PROC_FAILED,
            MPI.ERR_PROC_FAILED_PENDING,
            MPI.ERR_REVOKED,
        ):
            return True
        raise
    return False


def gone(comm: MPI.Intracomm, clock: Clock) -> list[int]:
    """The ranks of a broken communicator that this rank knows to be gone."""
    from mpi4py import MPI

    end = clock.now() + NAMED
    while True:
        failed = comm.Get_failed()
        if failed.size or clock.now() > end:
            return MPI.Group.Translate_ranks(failed, None, comm.group)
        MPI.COMM_SELF.Iprobe()  # a turn for the library, which a broken one would not give
        clock.sleep(1e-3)


def all_are(comm: MPI.Intracomm, fine: bool) -> bool:
    """Whether all of its ranks live and say that all is fine; all are told the same."""
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(fine)))
    except MPI.Exception:
        return False
