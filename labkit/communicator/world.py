"""Functions that return Communicators of all MPI ranks, of some ranks, or of one rank."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator import mpi_library
from labkit.communicator.clock import WALL, Clock
from labkit.communicator.communicator import LIMIT, Communicator
from labkit.communicator.launcher import QUIET, refuse_world_of_one
from labkit.communicator.membership import SPARE, Membership
from labkit.communicator.status_board import Mismatch, WaitTooLong, exit_without_finalize
from labkit.network import Network

if TYPE_CHECKING:
    from mpi4py import MPI


def world(
    ranks: Sequence[int] | None = None,
    timeout: float = LIMIT,
    network: str | Network | None = None,
    clock: Clock = WALL,
) -> Communicator:
    """Return the Communicator of all ranks that mpiexec started, or of the given ranks.

    Args:
        ranks: Numbers of the Communicator's ranks in MPI.COMM_WORLD, which alone call the function;
            by default, all ranks.
        timeout: Seconds after which a wait raises `WaitTooLong`; default: 600.
        network: A network to emulate; default: the real network.
        clock: The clock for waits and time stamps.

    Raises:
        LabkitError: A launcher has started several ranks, but each rank is a separate MPI world.
    """
    # Open MPI reads its environment variables when Python imports `mpi4py.MPI`.
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mpi4py import MPI

    # A launcher of another MPI library starts ranks that do not find each other. MPI raises no
    # error: each rank has a world of its own.
    if MPI.COMM_WORLD.size == 1:
        refuse_world_of_one(mpi_library.loaded(), os.environ)
    if ranks is None:
        return Communicator(MPI.COMM_WORLD, timeout, network, clock=clock)
    group = MPI.COMM_WORLD.group.Incl(list(ranks))
    return Communicator(MPI.COMM_WORLD.Create_group(group), timeout, network, clock=clock)


def join(
    ranks: Sequence[int],
    spares: int,
    limit: float = LIMIT,
    network: str | Network | None = None,
    clock: Clock = WALL,
) -> Communicator | None:
    """Return the Communicator of the working ranks; the other ranks wait in this call as spares.

    A spare rank returns from this call when it has replaced a dead rank. A spare rank also returns
    when the call no longer needs it.

    Args:
        ranks: Numbers in MPI.COMM_WORLD of all participating ranks, which alone call the function.
        spares: The number of spare ranks, which are the last ones of `ranks`.
        limit: Seconds after which a wait raises `WaitTooLong`; default: 600.
        network, clock: The same arguments as those of `world`.

    Returns:
        The Communicator of the working ranks; None for a spare rank that has replaced no rank.
    """
    from mpi4py import MPI

    if not spares:
        return world(ranks, limit, network, clock)
    comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(list(ranks)))
    membership = Membership(comm, comm.size - spares, clock)
    current: list[Communicator] = []

    def begin(working: MPI.Intracomm) -> None:
        current[:] = [Communicator(working, limit, network, clock=clock, membership=membership)]

    def abandon() -> None:
        for communicator in current:
            communicator.board.abandon()
        current.clear()

    working = membership.working()
    if membership.number != SPARE:
        begin(working)
    while membership.number == SPARE:
        if not membership.wait_as_spare():
            return None
        atexit.register(exit_without_finalize)
        membership.has_joined = True
        membership.replace_dead(begin, abandon)
    return current[0]


def single_rank(clock: Clock = WALL) -> Communicator:
    """Return a Communicator that consists only of this rank."""
    from mpi4py import MPI

    return Communicator(MPI.COMM_SELF, clock=clock)


# A rank that waits in the recovery barrier polls every `RESERVE_POLL_INTERVAL` seconds.
RESERVE_POLL_INTERVAL = 1e-3


class RecoveryBarrier:
    """A barrier that works after failed calls, because it has its own MPI communicator.

    A failed call may leave pending messages on its own communicator. The RecoveryBarrier has a
    separate communicator without pending messages of failed calls.

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
                no failure. A failure text makes ranks that still wait in the failed call raise an
                error.
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
            communicator.clock.sleep(RESERVE_POLL_INTERVAL)
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
