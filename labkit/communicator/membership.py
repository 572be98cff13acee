"""Membership of ranks: spare ranks replace dead ranks, and MPI calls detect failures (ULFM).

Detection of dead ranks with MPI's User-Level Failure Mitigation (ULFM).

Source: W. Bland, A. Bouteiller, T. Herault, G. Bosilca, J. Dongarra: Post-failure recovery of
MPI communication capability, 2013, International Journal of High Performance Computing
Applications 27.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator.clock import Clock

if TYPE_CHECKING:
    from mpi4py import MPI


# No message has the tag `UNUSED_TAG`, so a probe with the tag receives nothing and only detects
# failures.
UNUSED_TAG = 1 << 30
# After the first sign of a death, MPI gets at most `NAMING_TIMEOUT` seconds to name the dead rank.
NAMING_TIMEOUT = 1.0


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
            # The check for dead ranks is repeated, because MPI may report a death late. A receive
            # from a dead rank may fail before MPI reports the death.
            while issubclass(kind, MPI.Exception) and outlives() and self._clock.now() < end:
                self._check()
                self._clock.sleep(1e-3)


def outlives() -> bool:
    """Return whether MPI runs with ULFM, so that ranks survive the death of other ranks."""
    return os.environ.get("OMPI_MCA_mpi_ft_enable") == "1"  # noqa: SIM112 - Open MPI's spelling


def is_broken(comm: MPI.Intracomm) -> bool:
    """Return whether a rank has died, or a survivor has revoked the communicator.

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
        # A probe on COMM_SELF lets MPI make progress; a probe on the broken communicator `comm`
        # would fail.
        MPI.COMM_SELF.Iprobe()
        clock.sleep(1e-3)


def agree_all(comm: MPI.Intracomm, succeeded: bool) -> bool:
    """Return whether all ranks are alive and report success; every rank gets the same answer."""
    from mpi4py import MPI

    try:
        return bool(comm.Agree(int(succeeded)))
    except MPI.Exception:
        return False


SPARE = -1  # The number `SPARE` marks a spare rank, which can replace a dead working rank.
# A waiting spare rank checks every `POLL_INTERVAL` seconds whether its wait has ended.
POLL_INTERVAL = 5e-3
_END = 1  # The MPI tag `_END` marks the message that releases a spare rank from its wait.


class Membership:
    """All ranks of a call: the working ranks, and spare ranks that can replace dead working ranks.

    Args:
        comm: The mpi4py communicator of all ranks, working and spare.
        size: The number of working ranks, which have the lowest ranks in `comm`.
        clock: The clock with which spare ranks measure their waits.

    Attributes:
        comm: The communicator of the surviving ranks.
        numbers: For each rank of `comm`, the number of the working rank, or `SPARE` for a spare
            rank.
        members: For each rank of `comm`, its rank number at the start of the call.
        has_joined: Whether this rank was a spare rank and has joined the working ranks.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, clock: Clock) -> None:
        self.comm, self.size, self._clock = comm, size, clock
        self.numbers = [rank if rank < size else SPARE for rank in range(comm.size)]
        self.members, self.has_joined = list(range(comm.size)), False
        self._called = comm.size

    @property
    def number(self) -> int:
        """This rank's number among the working ranks; `SPARE` for a spare rank."""
        return self.numbers[self.comm.rank]

    @property
    def working_numbers(self) -> list[int]:
        """The numbers of all working ranks in ascending order."""
        return sorted(number for number in self.numbers if number != SPARE)

    @property
    def dead_ranks(self) -> list[int]:
        """The ranks of all dead processes, as numbered at the start of the call."""
        return sorted(set(range(self._called)) - set(self.members))

    def member(self, number: int) -> int:
        """Return the initial MPI rank of the process that is now the working rank `number`."""
        return self.members[self.numbers.index(number)]

    def working(self) -> MPI.Intracomm:
        """Return a communicator of the working ranks, ordered by number (collective of all ranks).

        A spare rank receives the null communicator.
        """
        from mpi4py import MPI

        colour = MPI.UNDEFINED if self.number == SPARE else 0
        comm = self.comm.Split(colour, self.number)
        # The assertion only tells the type checker the class of `comm`.
        assert isinstance(comm, MPI.Intracomm)
        return comm

    def wait_as_spare(self) -> bool:
        """Wait as a spare rank; return True if a rank dies, and False if the spare is released."""
        while not self.comm.Is_revoked():
            if any(self._has_ended(rank) for rank, n in enumerate(self.numbers) if n != SPARE):
                return False
            self._clock.sleep(POLL_INTERVAL)
        return True

    def _has_ended(self, rank: int) -> bool:
        """Return whether a rank has released the spare ranks.

        After a rank's death, the surviving working ranks choose between two actions. The surviving
        ranks either revoke the communicator or release the spare ranks.
        """
        from mpi4py import MPI

        try:
            return bool(self.comm.Iprobe(rank, _END))
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
            return False

    def release_spares(self) -> None:
        """Release the spare ranks from their wait; a working rank calls this method."""
        from mpi4py import MPI

        for rank, number in enumerate(self.numbers):
            if number == SPARE:
                try:
                    self.comm.Send(np.zeros(0), rank, _END)
                except MPI.Exception as error:
                    if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                        raise

    def replace_dead(
        self, begin: Callable[[MPI.Intracomm], None], abandon: Callable[[], None]
    ) -> None:
        """Assign the numbers of dead ranks to spare ranks (collective of all surviving ranks).

        Spare ranks also replace ranks that die while `replace_dead` runs. If no spare rank is left,
        the number of the dead rank remains unassigned.

        Args:
            begin: A function that builds the state of a working rank from a communicator of the
                working ranks. Spare ranks do not call `begin`.
            abandon: A function that discards the state that `begin` has built, if another rank
                dies.
        """
        from mpi4py import MPI

        for _ in range(self.comm.size):
            broken = self.comm
            broken.Revoke()
            survivors = broken.Shrink()
            # The assertion only tells the type checker the class of `survivors`.
            assert isinstance(survivors, MPI.Intracomm)
            old_ranks = MPI.Group.Translate_ranks(survivors.group, None, broken.group)
            self.comm = survivors
            self.numbers = _filled([self.numbers[rank] for rank in old_ranks], self.size)
            self.members = [self.members[rank] for rank in old_ranks]
            part, succeeded = MPI.COMM_NULL, True
            try:
                part = self.working()
                if self.number != SPARE:
                    begin(part)
            # `except Exception` also catches errors from a message that a dying rank sent only in
            # part.
            except Exception:
                succeeded = False
                survivors.Revoke()
                if part != MPI.COMM_NULL:
                    part.Revoke()
            if agree_all(survivors, succeeded):
                return
            if self.number != SPARE:
                abandon()
        raise LabkitError(
            "the surviving ranks cannot form a new communicator after the death of a rank"
        )


def _filled(numbers: list[int], size: int) -> list[int]:
    """Return the numbers of all ranks after spare ranks have taken the missing numbers.

    >>> _filled([0, 2, SPARE, SPARE], 3)
    [0, 2, 1, -1]
    """
    missing = sorted(set(range(size)) - set(numbers))
    return [missing.pop(0) if number == SPARE and missing else number for number in numbers]
