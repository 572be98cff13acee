"""An emulated network on the wall clock: data move at once, and arrive when they would."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.communicator.clock import Clock
from labkit.network import Links, Network

if TYPE_CHECKING:
    from mpi4py import MPI


class Emulation:
    """This rank's view of the emulated links.

    A sender books its links and sends along when the first byte leaves; the receiver books its
    own and sleeps until the delivery. The links' state lies in memory that the ranks of the host
    share, because emulated hosts share uplinks and one-sided access books both ends; all ranks
    read the same clock. Ranks must be on one real host.

    Args:
        comm: an mpi4py communicator of ranks on one host.
        network: what to emulate.
        clock: of the ranks' host.

    Attributes:
        network: what is emulated.
        paced: whether a rank holds a message back until the links on its way are free.
    """

    def __init__(self, comm: MPI.Intracomm, network: Network, clock: Clock) -> None:
        from mpi4py import MPI

        self._clock = clock
        self._place = comm.rank  # on the whole network, as all places
        self._places: Sequence[int] = range(comm.size)
        self.network, self._rank, self._computations = network, comm.rank, 0
        self._links = Links(network, comm.size)
        length = len(self._links.busy)
        self._window = MPI.Win.Allocate_shared(8 * length if comm.rank == 0 else 0, 8, comm=comm)
        memory: Any = self._window.Shared_query(0)[0]
        self._links.busy = np.ndarray(length, np.float64, memory)
        if comm.rank == 0:
            self._links.busy[:] = 0.0
        self._whole = True
        self.paced = False
        self._thread = threading.Lock()  # MPI's lock is one for all threads of a rank
        comm.Barrier()

    def part(self, ranks: Sequence[int]) -> Emulation:
        """The same links, as some of the ranks see them, who are called 0, 1, … there."""
        found = copy(self)
        found.network = self.network.part(ranks, len(self._places))
        found._rank, found._computations = list(ranks).index(self._rank), 0
        found._places = [self._places[rank] for rank in ranks]
        found._whole = False
        return found

    def depart(self, destination: int, nbytes: int) -> float:
        """Book this rank's links for a message; when its first byte leaves, by the shared clock."""
        with self._booking():
            place = self._places[destination]
            return self._links.depart(self._place, place, nbytes, self._clock.now())

    def arrive(self, messages: list[tuple[float, int, int]]) -> float:
        """Book the links into this rank; when the last of the messages is delivered.

        Args:
            messages: (time of first byte, source, bytes) of those that arrive in one round.
        """
        with self._booking():
            times = [
                self._links.arrive(self._places[source], self._place, nbytes, first_byte)
                for first_byte, source, nbytes in sorted(messages)
            ]
        return max(times, default=0.0)

    def transfer(self, source: int, destination: int, nbytes: int) -> float:
        """Book both ends at once, as one-sided access does; the time of delivery."""
        ends = self._places[source], self._places[destination]
        with self._booking():
            first = self._links.depart(*ends, nbytes, self._clock.now())
            return self._links.arrive(*ends, nbytes, first)

    def act_slow(self, computed: float) -> None:
        """Sleep as much longer as the emulated rank would compute, behind so many real seconds."""
        if self._rank in self.network.slow:
            factor = self.network.compute_factor(self._rank, self._computations)
            self._computations += 1
            self._clock.sleep((factor - 1) * computed)

    def close(self) -> None:
        """Free the shared state (collective); nothing, of a part."""
        if not self._whole:
            return
        self._links.busy = np.zeros(0)
        self._window.Free()

    @contextmanager
    def _booking(self) -> Iterator[None]:
        with self._thread:
            self._window.Lock(0)
            try:
                yield
            finally:
                self._window.Unlock(0)
