"""An emulated network on the wall clock: data move at once, and arrive when they would."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.communicator.clock import Clock
from labkit.network import FREE, Network
from labkit.network.shared import Message, shared_links

if TYPE_CHECKING:
    from mpi4py import MPI


class Emulation:
    """This rank's view of the emulated links.

    A sender hands its message to the links and sends along a ticket for it; the receiver sleeps
    until the delivery, and looks again when it wakes: others may have joined on the way. The
    links' state lies in memory that the ranks of the host share, because messages share links,
    and hosts uplinks; all ranks read the same clock. Ranks must be on one real host.

    Args:
        comm: an mpi4py communicator of ranks on one host.
        network: what to emulate.
        clock: of the ranks' host.

    Attributes:
        network: what is emulated.
        paced: whether a rank holds a message back until its link is free of those before it.
    """

    def __init__(self, comm: MPI.Intracomm, network: Network, clock: Clock) -> None:
        from mpi4py import MPI

        self._clock = clock
        self._place = comm.rank  # on the whole network, as all places
        self._places: Sequence[int] = range(comm.size)
        self.network = network
        self._links, self._turns = shared_links(network, comm.size), count()
        length = self._links.length
        self._window = MPI.Win.Allocate_shared(8 * length if comm.rank == 0 else 0, 8, comm=comm)
        memory: Any = self._window.Shared_query(0)[0]
        shared = np.ndarray(length, np.float64, memory)
        if comm.rank == 0:
            shared[:] = 0.0
        self._links.attach(shared)
        self._lock = _common_file(comm)
        self._whole = True
        self.paced = False
        self._thread = threading.Lock()  # MPI's lock is one for all threads of a rank
        comm.Barrier()

    def part(self, ranks: Sequence[int]) -> Emulation:
        """The same links, as some of the ranks see them, who are called 0, 1, … there."""
        found = copy(self)
        found.network = self.network.part(ranks, len(self._places))
        found._places = [self._places[rank] for rank in ranks]
        found._whole = False
        return found

    def turn(self) -> int:
        """The number of a round: its messages leave this rank behind those of earlier rounds."""
        return next(self._turns)

    def depart(self, destination: int, nbytes: int, turn: int = FREE) -> float:
        """Hand a message to this rank's links, in its turn or at once; its ticket."""
        return self._depart(self._place, self._places[destination], nbytes, turn)

    def holds(self, ticket: float) -> Iterator[float]:
        """Moments until which to sleep, one after the other, before the last message is sent."""
        if self.paced:
            yield from self._moments(lambda now: self._links.leaves(ticket, now))

    def deliveries(self, messages: list[tuple[float, int, int]]) -> Iterator[float]:
        """Moments until which to sleep, one after the other, until the last message is delivered.

        Args:
            messages: (ticket, source, bytes) of those that arrive in one round.
        """
        return self._deliveries(
            [(ticket, self._places[one], self._place, nbytes) for ticket, one, nbytes in messages]
        )

    def transfer(self, source: int, destination: int, nbytes: int) -> Iterator[float]:
        """Both at once, as one-sided access does it."""
        ends = self._places[source], self._places[destination]
        return self._deliveries([(self._depart(*ends, nbytes, FREE), *ends, nbytes)])

    def _depart(self, source: int, destination: int, nbytes: int, turn: int) -> float:
        if self.paced and turn != FREE:
            turn = self.turn()
        # When the sender is here, and not when the bookings of others are done.
        now = self._clock.now()
        while True:
            with self._booking():
                room = self._links.room(now)
                if room <= now:
                    return self._links.depart(source, destination, nbytes, turn, now)
            self._clock.sleep_until(room)
            now = self._clock.now()

    def _deliveries(self, messages: Sequence[Message]) -> Iterator[float]:
        return self._moments(lambda now: self._links.arrive(messages, now))

    def _moments(self, ask: Callable[[float], float]) -> Iterator[float]:
        """What is asked for, again and again until it is over, or nobody has joined since."""
        while True:
            with self._booking():
                now, version = self._clock.now(), self._links.version
                moment = ask(now)
            if moment <= now:
                return
            yield moment
            if version == self._links.version:
                return

    def close(self) -> None:
        """Free the shared state (collective); nothing, of a part."""
        if not self._whole:
            return
        self._links.attach(np.zeros(self._links.length))
        self._window.Free()
        os.close(self._lock)

    @contextmanager
    def _booking(self) -> Iterator[None]:
        # A lock of the kernel's, which it takes back from a rank that dies: a window's stays.
        with self._thread:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _common_file(comm: MPI.Intracomm) -> int:
    """A file without a name that each of these ranks has opened for itself (collective)."""
    own, path = tempfile.mkstemp(prefix="labkit-links-") if comm.rank == 0 else (-1, "")
    path = comm.bcast(path)
    found = own if comm.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    comm.Barrier()
    if comm.rank == 0:
        os.unlink(path)
    return found
