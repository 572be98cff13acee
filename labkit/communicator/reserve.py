"""Recovery of the communicator after a call that failed on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.communicator import Communicator
from labkit.communicator.status_board import Mismatch, WaitTooLong

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_INTERVAL = 1e-3  # seconds between two polls of a waiting rank


class RecoveryBarrier:
    """A barrier after failed calls, on a separate MPI communicator.

    A failed call may leave pending messages on the communicator that it used, but not on the
    separate communicator of this barrier.

    Args:
        comm: The mpi4py communicator of the ranks, which the RecoveryBarrier duplicates.
        communicator: The Communicator to restart after a failed call.
    """

    def __init__(self, comm: MPI.Intracomm, communicator: Communicator) -> None:
        self._comm, self._communicator = comm.Dup(), communicator

    def meet(self, name: str, failure: str = "", settle: Callable[[], None] = lambda: None) -> None:
        """Wait for all ranks, and restart the communicator if a rank's call failed (collective).

        Args:
            name: The name of this barrier, the same on all ranks.
            failure: The error text of this rank's failure since the last barrier; "" if there was
                no failure. A failure text causes ranks that still wait in the failed call to raise
                an error.
            settle: A function that returns when no other thread of this rank uses the communicator
                any more.

        Raises:
            Mismatch, WaitTooLong: Another rank does not reach the barrier.
        """
        communicator = self._communicator
        if failure:
            communicator.board.fail(failure)
        communicator.board.enter(name, waiting=True)
        failures = np.zeros(communicator.size)
        request = self._comm.Iallgather(np.array([float(bool(failure))]), failures)
        start = communicator.clock.now()
        while not request.Test():
            communicator.clock.sleep(POLL_INTERVAL)
            self._check_wait(name, start)
        if failures.any():
            settle()
            communicator.restart(self._comm)

    def _check_wait(self, name: str, start: float) -> None:
        communicator, waited = self._communicator, self._communicator.clock.now() - start
        if calls := communicator.board.find_deadlock():
            calls_text = "; ".join(f"rank {rank} waits in {call}" for rank, call in calls.items())
            communicator.board.fail(f"Mismatch: {calls_text}")
            raise Mismatch(f"ranks wait for each other in different calls: {calls_text}")
        if waited > communicator.wait_policy.timeout:
            raise WaitTooLong(
                f"rank {communicator.rank} has waited {waited:.0f} s in {name}: "
                f"{communicator.board.describe_ranks(name)}"
            )
