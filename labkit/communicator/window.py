"""Windows: memory that other ranks read and write without its owner's help."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.communicator.emulation import Emulation
from labkit.communicator.patience import Patience


class Window:
    """One-sided access: `put` and `get` move bytes; only the caller takes part.

    Back from a call, the data have arrived, on an emulated network when they would have. Who
    writes where and when is for the callers to agree on.

    Args:
        nbytes: size of this rank's memory.
        patience: of this rank, by whose communicator, meter and clock it goes.
        emulation: the network to emulate, or None.

    Attributes:
        memory: this rank's bytes.
    """

    def __init__(self, nbytes: int, patience: Patience, emulation: Emulation | None) -> None:
        from mpi4py import MPI

        self._mpi, self._rank, comm = MPI, patience.rank, patience.comm
        self._traffic, self._clock = patience.traffic, patience.clock
        self._emulation = emulation
        self._window = MPI.Win.Allocate(nbytes, 1, comm=comm)
        memory: Any = self._window.tomemory()
        self.memory = np.ndarray(nbytes, np.uint8, memory)
        self.memory[...] = 0
        comm.Barrier()

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Write an array's bytes into the memory of a rank, from `offset` on."""
        self._access(self._window.Put, data, rank, offset, source=self._rank, destination=rank)

    def get(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Read a rank's bytes, from `offset` on, into an array."""
        self._access(self._window.Get, data, rank, offset, source=rank, destination=self._rank)

    def sync(self) -> None:
        """See in this rank's memory what others have written, and let them see what it has."""
        self._window.Sync()

    def close(self) -> None:
        """Free the memory (collective)."""
        self.memory = np.zeros(0, np.uint8)
        self._window.Free()

    def _access(
        self, call: Any, data: np.ndarray, rank: int, offset: int, source: int, destination: int
    ) -> None:
        start = self._clock.now()
        self._window.Lock(rank, self._mpi.LOCK_SHARED)
        call([data.reshape(-1).view(np.uint8), self._mpi.BYTE], rank, [offset, data.nbytes])
        self._window.Unlock(rank)
        self._traffic.messages += 1
        self._traffic.payload_bytes += data.nbytes
        self._traffic.wire_bytes += data.nbytes if source != destination else 0
        if self._emulation is not None and source != destination:
            for moment in self._emulation.transfer(source, destination, data.nbytes):
                self._clock.sleep_until(moment)
        self._traffic.transfer_seconds += self._clock.now() - start
