"""A way on for ranks after a call that failed on some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.communicator import Communicator
from labkit.communicator.status_board import Mismatch, WaitTooLong

if TYPE_CHECKING:
    from mpi4py import MPI

NAP = 1e-3  # seconds


class Reserve:
    """Where ranks meet that may have left messages behind in the calls before.

    Args:
        comm: the mpi4py communicator of the ranks; this works on a duplicate of it.
        communicator: what is made anew where a call has failed.
    """

    def __init__(self, comm: MPI.Intracomm, communicator: Communicator) -> None:
        self._comm, self._communicator = comm.Dup(), communicator

    def meet(
        self, place: str, failure: str = "", settle: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for all ranks; restart the communicator if a call has failed on one (collective).

        Args:
            place: which all come to.
            failure: of this rank since the last meeting; ranks that wait in it are told.
            settle: ends what other threads of this rank do with the communicator.

        Raises:
            Mismatch, WaitTooLong: a rank does not come.
        """
        communicator = self._communicator
        if failure:
            communicator.board.fail(failure)
        communicator.board.enter(place, waiting=True)
        failures = np.zeros(communicator.size)
        request = self._comm.Iallgather(np.array([float(bool(failure))]), failures)
        start = communicator.clock.now()
        while not request.Test():
            communicator.clock.sleep(NAP)
            self._look_around(place, start)
        if failures.any():
            settle()
            communicator.restart(self._comm)

    def _look_around(self, place: str, start: float) -> None:
        communicator, waited = self._communicator, self._communicator.clock.now() - start
        if calls := communicator.board.deadlock():
            told = "; ".join(f"rank {rank} waits in {call}" for rank, call in calls.items())
            communicator.board.fail(f"Mismatch: {told}")
            raise Mismatch(f"ranks wait for each other in different calls: {told}")
        if waited > communicator.patience.limit:
            raise WaitTooLong(
                f"rank {communicator.rank} has waited {waited:.0f} s in {place}: "
                f"{communicator.board.everyone(place)}"
            )
