"""Windows: memory that other ranks read and write without its owner's help."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy

# Bytes of one get between hosts. Over TCP Open MPI 5.0.11 sends as many bytes along with a request
# as are asked for, and twice as many where there are more than these.
_PART = 1 << 16


class Window:
    """One-sided access: `put` and `get` move bytes; only the caller takes part.

    Back from a call, the data have arrived, on an emulated network when they would have. Who
    writes where and when is for the callers to agree on. Ranks of one host all see the memory, and
    an access is one copy.

    Args:
        nbytes: size of this rank's memory.
        patience: of this rank, by whose communicator, meter and clock it goes.
        emulation: the network to emulate, or None.

    Attributes:
        memory: this rank's bytes.
    """

    def __init__(self, nbytes: int, patience: WaitPolicy, emulation: Emulation | None) -> None:
        from mpi4py import MPI

        self._mpi, self._rank, comm = MPI, patience.rank, patience.comm
        self._comm = comm
        self._patience, self._clock = patience, patience.clock
        self._emulation = emulation
        self._views: list[NDArray[np.uint8]] = []  # of all ranks, on one host
        if patience.on_one_host:
            self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
            found = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
            self._views = [_view(memory) for memory in found]
            self.memory = self._views[self._rank]
        else:
            self._window = MPI.Win.Allocate(nbytes, 1, comm=comm)
            self.memory = _view(self._window.tomemory())
        self._window.Lock_all()
        self.memory[...] = 0
        comm.Barrier()

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Write an array's bytes into the memory of a rank, from `offset` on."""
        with self._counted(data.nbytes, self._rank, rank):
            self.write(data, rank, offset)

    def get(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Read a rank's bytes, from `offset` on, into an array."""
        with self._counted(data.nbytes, rank, self._rank):
            self.read(data, rank, offset)

    def write(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """As `put`, uncounted and as fast as it goes."""
        given = data.reshape(-1).view(np.uint8)
        if self._views:
            self._views[rank][offset : offset + given.nbytes] = given
            self.sync()
        else:
            self._window.Put([given, self._mpi.BYTE], rank, [offset, given.nbytes])
            self._window.Flush(rank)

    def read(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """As `get`, uncounted and as fast as it goes."""
        into = data.reshape(-1).view(np.uint8)
        if self._views:
            self.sync()
            into[...] = self._views[rank][offset : offset + into.nbytes]
        else:
            for start in range(0, into.nbytes, _PART):
                part = into[start : start + _PART]
                self._window.Get([part, self._mpi.BYTE], rank, [offset + start, part.nbytes])
            self._window.Flush(rank)

    def progress(self) -> None:
        """Let others' accesses to this rank's memory go on, where no hardware carries them out.

        Over TCP it is the MPI library of the owner that writes and reads, whenever it is called;
        who only looks at its memory, as in shared memory, would look for ever.
        """
        if not self._views:
            self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    def sync(self) -> None:
        """See in this rank's memory what others have written, and let them see what it has."""
        self._window.Sync()

    def close(self) -> None:
        """Free the memory (collective)."""
        self._views, self.memory = [], np.zeros(0, np.uint8)
        self._window.Unlock_all()
        self._window.Free()

    @contextmanager
    def _counted(self, nbytes: int, source: int, destination: int) -> Iterator[None]:
        start = self._clock.now()
        yield
        self._patience.traffic.payload_bytes += nbytes
        other = source if destination == self._rank else destination
        self._patience.count_to(other, nbytes if source != destination else 0)
        if self._emulation is not None and source != destination:
            for moment in self._emulation.transfer(source, destination, nbytes):
                self._clock.sleep_until(moment)
        self._patience.traffic.transfer_seconds += self._clock.now() - start


def _view(memory: Any) -> NDArray[np.uint8]:
    return np.ndarray(len(memory), np.uint8, memory)
