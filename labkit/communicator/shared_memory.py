"""Allreduce of ranks on one host: each adds up its part, reading the others' memory in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from labkit.schedules import boundaries

Piece: TypeAlias = tuple[int, np.ndarray]

BLOCK = 1 << 18  # bytes that stay in a core's cache between adding and writing
LINE = 64  # bytes of a cache line: no two ranks write to the same


class SharedMemory:
    """Buffers and flags that all ranks of a host see.

    Rank r adds up part r of all buffers, in order of rank, and writes the sum into each of them:
    p-1 reads and p writes of n/p bytes, no message. Between the phases ranks wait for each other's
    flags.

    Args:
        comm: an mpi4py communicator of ranks on one host.
        pause: called between two looks at a flag, with the number of looks so far; raises when
            waiting has become pointless.
    """

    def __init__(self, comm: Any, pause: Callable[[int], None]) -> None:
        self._comm, self._pause = comm, pause
        self._window, views = _shared(comm, LINE)
        self._flags = [view[:8].view(np.int64) for view in views]
        self._weights = [view[8:16].view(np.float64) for view in views]
        self._phase, self._waited = 0, 0.0
        self._buffers: list[tuple[Any, list[np.ndarray]]] = []
        self._staging: list[np.ndarray] | None = None
        self._known: dict[tuple[int, int, str], list[np.ndarray]] = {}  # views by address

    def allocate(self, nbytes: int) -> np.ndarray:
        """This rank's buffer of so many bytes, which the others can read and write (collective)."""
        window, views = _shared(self._comm, nbytes)
        self._buffers.append((window, views))
        own: np.ndarray = views[self._comm.rank]
        return own

    def allreduce(
        self,
        buffer: np.ndarray,
        weight: float | None = None,
        pieces: Sequence[Piece] | None = None,
    ) -> float:
        """Sum the ranks' flat buffers of one length, in place.

        A buffer from `allocate` is used where it is; any other is copied in and out.

        Args:
            buffer: this rank's values.
            weight: of this rank, for the weighted mean instead of the sum.
            pieces: (offset, values) that make up `own_part` of the buffer, so that they need not be
                copied into it; only for a buffer from `allocate`.

        Returns:
            Seconds spent waiting for other ranks.
        """
        self._waited = 0.0
        views = self._views_of(buffer)
        if views is not None:
            self._reduce(views, weight, pieces)
            return self._waited
        if self._staging is None or self._staging[0].nbytes < buffer.nbytes:
            self.allocate(buffer.nbytes)
            self._staging = self._buffers[-1][1]
        views = [view[: buffer.nbytes].view(buffer.dtype) for view in self._staging]
        staged = views[self._comm.rank]
        staged[...] = buffer
        self._reduce(views, weight, None)
        buffer[...] = staged  # nobody writes here before this rank comes to the next call
        return self._waited

    def close(self) -> None:
        """Free all windows (collective)."""
        self._known.clear()
        self._flags.clear()
        self._weights.clear()
        for window, views in [*self._buffers, (self._window, [])]:
            views.clear()
            window.Free()

    def own_part(self, length: int) -> slice:
        """The elements of a buffer that this rank adds up."""
        edges = boundaries(length, self._comm.size)
        return slice(int(edges[self._comm.rank]), int(edges[self._comm.rank + 1]))

    def _reduce(
        self,
        buffers: list[np.ndarray],
        weight: float | None,
        pieces: Sequence[Piece] | None,
    ) -> None:
        if weight is not None:
            self._weights[self._comm.rank][0] = weight
        self._meet()
        shares = None
        if weight is not None:
            weights = [float(each[0]) for each in self._weights]
            shares = [each / (sum(weights) or 1.0) for each in weights]
        if pieces is None:
            part = self.own_part(len(buffers[0]))
            pieces = [(part.start, buffers[self._comm.rank][part])]
        for start, own in pieces:
            self._add([each[start : start + len(own)] for each in buffers], own, shares)
        self._meet()

    def _add(self, parts: list[np.ndarray], own: np.ndarray, shares: list[float] | None) -> None:
        """Every part becomes the sum in order of rank, or the weighted one, block by block: what
        is added is still in the cache when it is written.

        Args:
            parts: the ranks' memory of the same elements.
            own: the values of this rank, there or elsewhere.
            shares: of the ranks.
        """
        # Of own values that are elsewhere, nobody reads the place before it is written.
        target = 0 if np.may_share_memory(own, parts[self._comm.rank]) else self._comm.rank
        step = BLOCK // own.itemsize
        for start in range(0, len(own), step):
            blocks = [part[start : start + step] for part in parts]
            values, rank = list(blocks), self._comm.rank
            values[rank] = own[start : start + step]
            total = blocks[target]
            _sum(values, shares, total)
            for block in blocks:
                if block is not total:
                    block[...] = total

    def _views_of(self, buffer: np.ndarray) -> list[np.ndarray] | None:
        """The same elements in every rank's memory, when the buffer lies in an allocated one."""
        address = buffer.__array_interface__["data"][0]
        key = (address, buffer.nbytes, buffer.dtype.str)
        if key not in self._known:
            for _, views in self._buffers:
                start = address - views[self._comm.rank].ctypes.data
                if start >= 0 and start + buffer.nbytes <= views[self._comm.rank].nbytes:
                    parts = [view[start : start + buffer.nbytes] for view in views]
                    self._known[key] = [part.view(buffer.dtype) for part in parts]
        return self._known.get(key)

    def _meet(self) -> None:
        """Wait until every rank has come to this phase; writes before it are then visible."""
        self._window.Sync()
        self._phase += 1
        self._flags[self._comm.rank][0] = self._phase
        polls, start = 0, time.perf_counter()
        while min(int(flag[0]) for flag in self._flags) < self._phase:
            self._pause(polls)
            polls += 1
        self._waited += time.perf_counter() - start
        self._window.Sync()


def _sum(values: list[np.ndarray], shares: list[float] | None, total: np.ndarray) -> None:
    """The sum of two or more arrays in their order, weighted where shares are given.

    `total` may be the first of the values, or none of them.
    """
    if shares is not None and len(set(shares)) > 1:
        np.multiply(values[0], total.dtype.type(shares[0]), out=total)
        for value, share in zip(values[1:], shares[1:], strict=True):
            total += value * total.dtype.type(share)
        return
    np.add(values[0], values[1], out=total)
    for value in values[2:]:
        np.add(total, value, out=total)
    if shares is not None:
        np.multiply(total, total.dtype.type(shares[0]), out=total)


def _shared(comm: Any, nbytes: int) -> tuple[Any, list[np.ndarray]]:
    """A window with so many bytes of each rank, aligned to cache lines; views on all of them."""
    from mpi4py import MPI

    size = -(-nbytes // LINE) * LINE + LINE
    window = MPI.Win.Allocate_shared(size, 1, comm=comm)
    views = []
    for rank in range(comm.size):
        memory: Any = window.Shared_query(rank)[0]
        whole = np.ndarray(size, np.uint8, memory)
        offset = -whole.ctypes.data % LINE
        views.append(whole[offset : offset + nbytes])
    window.Lock_all()
    views[comm.rank][...] = 0
    comm.Barrier()
    return window, views
