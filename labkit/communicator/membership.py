"""Ranks that work, and spares, which wait until one of those is gone and take its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator.clock import Clock
from labkit.communicator.ulfm import all_are

if TYPE_CHECKING:
    from mpi4py import MPI

SPARE = -1  # the number of who has none
LOOK_EVERY = 5e-3  # seconds
_END = 1  # a tag: nobody needs spares any more


class Membership:
    """All ranks of a call, of which the first work.

    Args:
        comm: of all.
        size: how many work.
        clock: by which spares wait.

    Attributes:
        comm: of those that live.
        numbers: by its ranks the number under which each works; `SPARE` of a spare.
        members: likewise, its rank in the beginning.
        has_joined: whether this rank was a spare.
    """

    def __init__(self, comm: MPI.Intracomm, size: int, clock: Clock) -> None:
        self.comm, self.size, self._clock = comm, size, clock
        self.numbers = [rank if rank < size else SPARE for rank in range(comm.size)]
        self.members, self.has_joined = list(range(comm.size)), False
        self._called = comm.size

    @property
    def number(self) -> int:
        """Under which this rank works."""
        return self.numbers[self.comm.rank]

    @property
    def working_numbers(self) -> list[int]:
        """Of all that work, in order."""
        return sorted(number for number in self.numbers if number != SPARE)

    @property
    def lost(self) -> list[int]:
        """Who is gone, by rank in the beginning."""
        return sorted(set(range(self._called)) - set(self.members))

    def member(self, number: int) -> int:
        """Who has worked under a number, by rank in the beginning."""
        return self.members[self.numbers.index(number)]

    def working(self) -> MPI.Intracomm:
        """Those that work, in the order of their numbers; null for a spare (collective of all)."""
        from mpi4py import MPI

        colour = MPI.UNDEFINED if self.number == SPARE else 0
        comm = self.comm.Split(colour, self.number)
        assert isinstance(comm, MPI.Intracomm)  # as all parts of one are, and the null one
        return comm

    def is_called(self) -> bool:
        """Wait, as a spare, until others are gone; False: all have ended without."""
        while not self.comm.Is_revoked():
            if any(self._has_ended(rank) for rank, n in enumerate(self.numbers) if n != SPARE):
                return False
            self._clock.sleep(LOOK_EVERY)
        return True

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank says so; one that is gone does not: those that live say what follows."""
        from mpi4py import MPI

        try:
            return bool(self.comm.Iprobe(rank, _END))
        except MPI.Exception as error:
            if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                raise
            return False

    def dismiss(self) -> None:
        """Tell the spares, as one that works, that nobody needs them any more."""
        from mpi4py import MPI

        for rank, number in enumerate(self.numbers):
            if number == SPARE:
                try:
                    self.comm.Send(np.zeros(0), rank, _END)
                except MPI.Exception as error:
                    if error.Get_error_class() not in (MPI.ERR_PROC_FAILED, MPI.ERR_REVOKED):
                        raise

    def fill(self, begin: Callable[[MPI.Intracomm], None], abandon: Callable[[], None]) -> None:
        """Spares take the numbers of those that are gone (collective of all that live).

        Who dies meanwhile is replaced, too, or left out where no spare is left.

        Args:
            begin: makes of those that work what they work with; not called by a spare.
            abandon: lets go of it, where another one has died meanwhile.
        """
        from mpi4py import MPI

        for _ in range(self.comm.size):
            broken = self.comm
            broken.Revoke()
            whole = broken.Shrink()
            assert isinstance(whole, MPI.Intracomm)  # as what shrinks is one
            places = MPI.Group.Translate_ranks(whole.group, None, broken.group)
            self.comm = whole
            self.numbers = _filled([self.numbers[place] for place in places], self.size)
            self.members = [self.members[place] for place in places]
            part, fine = MPI.COMM_NULL, True
            try:
                part = self.working()
                if self.number != SPARE:
                    begin(part)
            except Exception:  # also of what one that died meanwhile has left half said
                fine = False
                whole.Revoke()
                if part != MPI.COMM_NULL:
                    part.Revoke()
            if all_are(whole, fine):
                return
            if self.number != SPARE:
                abandon()
        raise LabkitError("those that live find no way to go on together")


def _filled(numbers: list[int], size: int) -> list[int]:
    """The numbers after spares have taken those that are missing, lowest first.

    >>> _filled([0, 2, SPARE, SPARE], 3)
    [0, 2, 1, -1]
    """
    missing = sorted(set(range(size)) - set(numbers))
    return [missing.pop(0) if number == SPARE and missing else number for number in numbers]
