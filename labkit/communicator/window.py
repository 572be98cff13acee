"""Windows: memory of a rank that other ranks read and write by one-sided access."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy

# _PART is the maximum number of bytes of one `get` operation between hosts. Over TCP, the request
# message that Open MPI 5.0.11 sends for a `get` is as long as the requested data; above _PART
# bytes, it is twice as long.
_PART = 1 << 16


class Window:
    """Memory for one-sided access: `put` and `get` move bytes without a call of the target rank.

    A call of `put` or `get` returns after the data have arrived; on an emulated network, it returns
    at the emulated arrival time. The calling ranks must agree among themselves where and when each
    rank writes. If all ranks run on one host, the window is shared memory, and each access copies
    the data once.

    Args:
        nbytes: The size of this rank's memory in bytes.
        wait_policy: The wait policy of this rank, with its communicator, traffic meter and clock.
        emulation: The emulated network; None: the real network.

    Attributes:
        memory: The memory of this rank, as bytes that other ranks read and write.
    """

    def __init__(self, nbytes: int, wait_policy: WaitPolicy, emulation: Emulation | None) -> None:
        from mpi4py import MPI

        self._mpi, self._rank, comm = MPI, wait_policy.rank, wait_policy.comm
        self._comm = comm
        self._wait_policy, self._clock = wait_policy, wait_policy.clock
        self._emulation = emulation
        # This list contains a view of each rank's memory; it is empty if ranks run on several
        # hosts.
        self._views: list[NDArray[np.uint8]] = []
        if wait_policy.on_one_host:
            self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=comm)
            memories = [self._window.Shared_query(rank)[0] for rank in range(comm.size)]
            self._views = [_view(memory) for memory in memories]
            self.memory = self._views[self._rank]
        else:
            self._window = MPI.Win.Allocate(nbytes, 1, comm=comm)
            self.memory = _view(self._window.tomemory())
        self._window.Lock_all()
        self.memory[...] = 0
        comm.Barrier()

    def put(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Write an array's bytes into the memory of a rank, from byte `offset` on."""
        with self._counted(data.nbytes, self._rank, rank):
            self.write(data, rank, offset)

    def get(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Read bytes from the memory of a rank, from byte `offset` on, into an array."""
        with self._counted(data.nbytes, rank, self._rank):
            self.read(data, rank, offset)

    def write(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Write like `put`, but without metering and without network emulation."""
        flat = data.reshape(-1).view(np.uint8)
        if self._views:
            self._views[rank][offset : offset + flat.nbytes] = flat
            self.sync()
        else:
            self._window.Put([flat, self._mpi.BYTE], rank, [offset, flat.nbytes])
            self._window.Flush(rank)

    def read(self, data: np.ndarray, rank: int, offset: int = 0) -> None:
        """Read bytes like `get`, but without metering and without network emulation."""
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
        """Let the MPI library process other ranks' accesses to this rank's memory.

        Over TCP, the MPI library of the rank that owns the memory performs the accesses, but only
        during MPI calls of this rank. A rank that only polls its own memory, without MPI calls,
        would therefore wait forever.
        """
        if not self._views:
            self._comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)

    def sync(self) -> None:
        """Synchronize memory, so that the writes of each rank become visible to all ranks."""
        self._window.Sync()

    def close(self) -> None:
        """Free the window's memory on all ranks (collective)."""
        self._views, self.memory = [], np.zeros(0, np.uint8)
        self._window.Unlock_all()
        self._window.Free()

    @contextmanager
    def _counted(self, nbytes: int, source: int, destination: int) -> Iterator[None]:
        start = self._clock.now()
        yield
        self._wait_policy.traffic.payload_bytes += nbytes
        other = source if destination == self._rank else destination
        self._wait_policy.count_to(other, nbytes if source != destination else 0)
        if self._emulation is not None and source != destination:
            for moment in self._emulation.transfer(source, destination, nbytes):
                self._clock.sleep_until(moment)
        self._wait_policy.traffic.transfer_seconds += self._clock.now() - start


def _view(memory: Any) -> NDArray[np.uint8]:
    return np.ndarray(len(memory), np.uint8, memory)
