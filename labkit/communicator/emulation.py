"""Network emulation in real time: receivers delay each message until its emulated delivery time."""

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
    """The links of an emulated network, on which each rank reserves transfer time for messages.

    A sender books its message on the emulated links. Each message carries the number (ticket) of
    its booking. The receiver of a message sleeps until the emulated delivery time of the message.
    When the receiver wakes up, it computes the delivery time again. New messages on the same links
    may have delayed the delivery. The state of the emulated links is in shared memory. Messages
    from different ranks share links, and emulated hosts share uplinks. All ranks must run on the
    same real host, and must read the clock of this host.

    Args:
        comm: An mpi4py communicator whose ranks are all on one host.
        network: The network to emulate.
        clock: The clock of the host.

    Attributes:
        network: The emulated network.
        paced: Whether a rank delays each message until its earlier messages have left the emulated
            link.
    """

    def __init__(self, comm: MPI.Intracomm, network: Network, clock: Clock) -> None:
        from mpi4py import MPI

        self._clock = clock
        # `_rank` is the number of this rank among all ranks of the emulated network.
        self._rank = comm.rank
        self._ranks: Sequence[int] = range(comm.size)
        self.network = network
        self._links, self._turns = shared_links(network, comm.size), count()
        length = self._links.length
        self._window = MPI.Win.Allocate_shared(8 * length if comm.rank == 0 else 0, 8, comm=comm)
        memory: Any = self._window.Shared_query(0)[0]
        shared = np.ndarray(length, np.float64, memory)
        if comm.rank == 0:
            shared[:] = 0.0
        self._links.attach(shared)
        self._lock = _open_lock_file(comm)
        self._owns_links = True
        self.paced = False
        # `_thread` keeps out other threads of this rank, which share the file lock.
        self._thread = threading.Lock()
        comm.Barrier()

    def part(self, ranks: Sequence[int]) -> Emulation:
        """Return a view of the emulated links for a subset of the ranks, renumbered from 0."""
        view = copy(self)
        view.network = self.network.part(ranks, len(self._ranks))
        view._ranks = [self._ranks[rank] for rank in ranks]
        view._owns_links = False
        return view

    def turn(self) -> int:
        """Return a new round's number; its messages leave after those of all earlier rounds."""
        return next(self._turns)

    def depart(self, destination: int, nbytes: int, turn: int = FREE) -> float:
        """Book a message on the emulated links of this rank, and return the ticket of the booking.

        Args:
            destination: The rank that receives the message.
            nbytes: The size of the message in bytes.
            turn: The number of the message's round, as returned by `turn()`; by default, the
                message leaves at once.
        """
        return self._depart(self._rank, self._ranks[destination], nbytes, turn)

    def send_moments(self, ticket: float) -> Iterator[float]:
        """Yield wake-up times until the sender may send its message; yield none if not `paced`."""
        if self.paced:
            yield from self._moments(lambda now: self._links.leaves(ticket, now))

    def deliveries(self, messages: list[tuple[float, int, int]]) -> Iterator[float]:
        """Yield wake-up times of the receiver until all of the given messages are delivered.

        Args:
            messages: The messages that arrive in a round, each as (ticket, rank of the sender,
                bytes).
        """
        return self._deliveries(
            [
                (ticket, self._ranks[source], self._rank, nbytes)
                for ticket, source, nbytes in messages
            ]
        )

    def transfer(self, source: int, destination: int, nbytes: int) -> Iterator[float]:
        """Book a one-sided transfer on the links, and yield wake-up times until its delivery."""
        ends = self._ranks[source], self._ranks[destination]
        return self._deliveries([(self._depart(*ends, nbytes, FREE), *ends, nbytes)])

    def _depart(self, source: int, destination: int, nbytes: int, turn: int) -> float:
        if self.paced and turn != FREE:
            turn = self.turn()
        # `_depart` reads the departure time before it waits for the file lock. The wait for the
        # file lock must not delay the departure.
        now = self._clock.now()
        while True:
            with self._locked():
                room = self._links.room(now)
                if room <= now:
                    return self._links.depart(source, destination, nbytes, turn, now)
            self._clock.sleep_until(room)
            now = self._clock.now()

    def _deliveries(self, messages: Sequence[Message]) -> Iterator[float]:
        return self._moments(lambda now: self._links.arrive(messages, now))

    def _moments(self, event: Callable[[float], float]) -> Iterator[float]:
        """Yield the time of an event; after each wake-up, compute the time again.

        The iterator ends when the event's time has passed. The iterator also ends if no new message
        has changed the time.
        """
        while True:
            with self._locked():
                now, version = self._clock.now(), self._links.version
                moment = event(now)
            if moment <= now:
                return
            yield moment
            if version == self._links.version:
                return

    def close(self) -> None:
        """Free the shared state of the links (collective)."""
        if not self._owns_links:
            return
        self._links.attach(np.zeros(self._links.length))
        self._window.Free()
        os.close(self._lock)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The emulation protects its links with a file lock. If a rank dies, the kernel releases the
        # rank's file locks. A lock of an MPI window would stay locked if the rank that holds it
        # died.
        with self._thread:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)


def _open_lock_file(comm: MPI.Intracomm) -> int:
    """Open an unlinked temporary file that all ranks share; return its descriptor (collective)."""
    created, path = tempfile.mkstemp(prefix="labkit-links-") if comm.rank == 0 else (-1, "")
    path = comm.bcast(path)
    descriptor = created if comm.rank == 0 else os.open(path, os.O_RDWR | os.O_CLOEXEC)
    comm.Barrier()
    if comm.rank == 0:
        os.unlink(path)
    return descriptor
