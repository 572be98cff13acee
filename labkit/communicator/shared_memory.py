"""Allreduce in shared memory, where each rank sums one range of elements over all buffers."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.units import bytes_text
from labkit.communicator.status_board import RankDied
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import is_16_bit_float
from labkit.schedules import boundaries

if TYPE_CHECKING:
    from mpi4py import MPI

Piece: TypeAlias = tuple[int, np.ndarray]

BLOCK = 1 << 18  # Sums are computed in blocks of `BLOCK` bytes, which fit into a core's cache.
SHARED = Path("/dev/shm")  # Open MPI creates shared memory in the folder /dev/shm.
LINE = 64  # A cache line has 64 bytes; no two ranks write to the same cache line.


class SeparateBuffers(NamedTuple):
    """Separate memory for the inputs or the result of a sum, which avoids copies of the buffer.

    Attributes:
        pieces: Parts of the input that lie outside the buffer. If None, the sum reads its input
            from the buffer.
        into: A buffer from `allocate(common=True)` that receives the sum once for all ranks. The
            sum in `into` stays valid until the ranks begin their next sum in shared memory. If
            `into` is None, each rank's buffer receives the sum.
    """

    pieces: Sequence[Piece] | None = None
    into: np.ndarray | None = None


class SharedRegion(NamedTuple):
    """The location of one buffer of each rank in shared memory.

    Attributes:
        views: A NumPy view of each rank's buffer, in rank order.
        location: The location as text, such as a byte offset, which must be the same on all ranks.
        code: The CRC-32 of `location`.
    """

    views: list[np.ndarray]
    location: str
    code: int


class Flags:
    """Flags in shared memory that synchronize the ranks of a host and exchange their weights.

    All ranks of the host call the constructor together (collective).

    Args:
        wait_policy: The wait policy of this rank, with its traffic meter.

    Attributes:
        weights: For each rank, a shared array whose only element is the rank's weight.
    """

    def __init__(self, wait_policy: WaitPolicy) -> None:
        self._rank, self._wait_policy, self._phase = wait_policy.rank, wait_policy, 0
        self._window, views = _shared(wait_policy.comm, LINE)
        self._phases = [view[:8].view(np.int64) for view in views]
        self.weights = [view[8:16].view(np.float64) for view in views]
        self._codes = [view[16:24].view(np.int64) for view in views]
        # The array `_vote` contains the ballot that decided the latest vote: the first ballot that
        # any rank cast.
        self._vote = np.zeros(1, np.int64)
        self._ballot = views[0].ctypes.data - self._window.Shared_query(0)[0].address + 24

    def agree(self, location: str = "", code: int = 0) -> None:
        """Wait until every rank has reached this call with a buffer at the same location.

        Args:
            location: The location of the buffer as text, for the error message.
            code: The CRC-32 of `location`.

        Raises:
            Mismatch: Ranks are in different calls, or use different locations.
        """
        local = self._wait_policy.code ^ code
        # In `agree`, a rank may overwrite the code of its previous call. All ranks have already
        # read the code of the previous call.
        self._codes[self._rank][0] = local
        self.barrier()
        if any(other[0] != local for other in self._codes):
            self._wait_policy.raise_mismatch(location)

    def agree_to_continue(self, location: str) -> None:
        """Wait as in `agree`; afterwards, all ranks continue, or all ranks raise an error.

        One rank may notice a failure on another host before the other ranks do. Without a vote,
        ranks would continue after another rank has raised an error. The continuing ranks would wait
        in a call for the failed rank. Each rank votes on whether to continue, and the first vote
        decides for all ranks.
        """
        try:
            self.agree(location)
        except RankDied:
            # No vote is needed after `RankDied`, because `check_failures` has interrupted all other
            # ranks.
            raise
        except LabkitError:
            if not self._first_vote(continues=False):
                raise
        else:
            if not self._first_vote(continues=True):
                # The barrier fails, because a rank that voted to stop never enters the barrier.
                self.barrier()

    def _first_vote(self, continues: bool) -> bool:
        """Vote on whether to continue; return the first vote of any rank in the current phase."""
        ballot, previous = (
            np.array([self._phase if continues else -self._phase]),
            np.empty(1, np.int64),
        )
        self._window.Compare_and_swap(ballot, self._vote, previous, 0, self._ballot)
        self._window.Flush(0)
        self._vote = ballot if previous[0] == self._vote[0] else previous
        return bool(self._vote[0] > 0)

    def barrier(self) -> None:
        """Wait until all ranks have reached this phase and all their earlier writes are visible."""
        self._window.Sync()
        self._phase += 1
        self._phases[self._rank][0] = self._phase
        polls, clock = 0, self._wait_policy.clock
        start = clock.now()
        while min(int(phase[0]) for phase in self._phases) < self._phase:
            self._wait_policy.pause(polls)
            polls += 1
        self._wait_policy.traffic.wait_seconds += clock.now() - start
        self._window.Sync()

    def close(self) -> None:
        """Free the flags (collective)."""
        self._phases.clear()
        self._codes.clear()
        self.weights.clear()
        _free(self._window)


class SharedMemory:
    """Buffers in the shared memory of a host, and allreduce over these buffers.

    Each of p ranks sums 1/p of the elements over all buffers. The values of the ranks are added in
    rank order. Each rank writes its part of the sum into each buffer. With p ranks, each rank does
    p-1 reads and p writes per allreduce. For p buffers of n bytes, each read or write has n/p
    bytes. Allreduce in shared memory sends no message. If all ranks share one result buffer, each
    rank writes its part of the sum only once. Flags synchronize the ranks; the first call that
    needs the flags creates them.

    Args:
        wait_policy: The wait policy for waits among the ranks of this host.

    Attributes:
        wait_policy: The wait policy for waits among the ranks of this host.
    """

    def __init__(self, wait_policy: WaitPolicy) -> None:
        self._comm, self.wait_policy = wait_policy.comm, wait_policy
        self._flags: Flags | None = None
        self._buffers: list[tuple[Any, list[np.ndarray]]] = []
        self._commons: list[Any] = []
        self._staging: list[np.ndarray] | None = None
        # The keys of the dict `_places` are tuples (address, number of bytes, dtype) of buffers.
        self._places: dict[tuple[int, int, str], SharedRegion] = {}

    def allocate(self, nbytes: int, common: bool = False) -> np.ndarray:
        """Allocate a buffer of this rank in the host's shared memory (collective).

        Args:
            nbytes: The size of this rank's buffer in bytes.
            common: Whether all ranks share one buffer; default: each rank gets its own buffer.
        """
        self._get_flags()
        window, views = _shared(self._comm, nbytes, common)
        if common:
            self._commons.append(window)
        else:
            self._buffers.append((window, views))
        buffer: np.ndarray = views[0 if common else self._comm.rank]
        return buffer

    def allreduce(
        self,
        buffer: np.ndarray,
        weight: float | None = None,
        separate: SeparateBuffers | None = None,
    ) -> None:
        """Sum the ranks' flat buffers, which have the same length, in place.

        A buffer from `allocate` needs no copy; any other buffer is copied to shared memory and
        back.

        Args:
            buffer: The values of this rank.
            weight: The weight of this rank's values in a weighted mean; None: compute a sum.
            separate: Separate memory for the inputs or the result; only allowed for a buffer from
                `allocate`.
        """
        self._run_in_shared_memory(
            buffer, partial(self._reduce, weight, separate or SeparateBuffers())
        )

    def allreduce_around(
        self, buffer: np.ndarray, part: slice, between: Callable[[np.ndarray], None]
    ) -> None:
        """Sum the buffers inside this host, reduce the sum between hosts, and copy the result back.

        Args:
            buffer: The values of this rank, which the sum replaces.
            part: The elements that this rank sums and exchanges with other hosts; the slice may be
                empty. The element ranges of two ranks do not overlap.
            between: A function that receives the full buffer and reduces the elements of `part`
                between hosts, in place.
        """
        self._run_in_shared_memory(buffer, partial(self._reduce_around, part, between))

    def _run_in_shared_memory(
        self, buffer: np.ndarray, work: Callable[[Flags, SharedRegion], None]
    ) -> None:
        """Run a sum directly on a buffer in shared memory, or on a shared copy of the buffer."""
        self.wait_policy.start_wait()
        flags = self._get_flags()
        place = self._find_place(buffer)
        if place is not None:
            work(flags, place)
            return
        if self._staging is None or self._staging[0].nbytes < buffer.nbytes:
            # If a rank has failed, MPI's allocation of shared memory would wait for the failed rank
            # forever. All ranks first agree to continue, and then allocate shared memory.
            flags.agree_to_continue(", in new memory")
            self.wait_policy.check_failures()
            with self.wait_policy.failure_guard:
                self.allocate(buffer.nbytes)
            self._staging = self._buffers[-1][1]
        views = [view[: buffer.nbytes].view(buffer.dtype) for view in self._staging]
        staged = views[self._comm.rank]
        staged[...] = buffer
        work(flags, _make_place(views, ", in its staging buffer"))
        # Other ranks write to `staged` only after this rank begins its next call, so the copy is
        # safe.
        buffer[...] = staged

    def close(self) -> None:
        """Free all windows (collective)."""
        self._places.clear()
        for window, views in self._buffers:
            views.clear()
            _free(window)
        for window in self._commons:
            _free(window)
        if self._flags is not None:
            self._flags.close()

    def local_part(self, length: int) -> slice:
        """Return the range of elements that this rank sums.

        Args:
            length: The number of elements of the buffer.
        """
        edges = boundaries(length, self._comm.size)
        return slice(int(edges[self._comm.rank]), int(edges[self._comm.rank + 1]))

    def _get_flags(self) -> Flags:
        """Return the flags; the first call creates them (collective)."""
        if self._flags is None:
            self._flags = Flags(self.wait_policy)
        return self._flags

    def _reduce_around(
        self, part: slice, between: Callable[[np.ndarray], None], flags: Flags, place: SharedRegion
    ) -> None:
        flags.agree(place.location, place.code)
        whole, parts = place.views[0], [view[part] for view in place.views]
        if len(parts) > 1:  # The ranks write the sum into the first rank's buffer.
            self._add(parts, parts[self._comm.rank], None, parts[0])
        between(whole)
        for other in parts[1:]:
            other[...] = parts[0]
        flags.barrier()

    def _reduce(
        self, weight: float | None, separate: SeparateBuffers, flags: Flags, place: SharedRegion
    ) -> None:
        buffers = place.views
        if weight is not None:
            flags.weights[self._comm.rank][0] = weight
        if separate.into is None:
            flags.agree(place.location, place.code)
        else:
            flags.agree(f"{place.location}, into common memory", ~place.code)
        shares = None
        if weight is not None:
            weights = [float(shared[0]) for shared in flags.weights]
            shares = [value / (sum(weights) or 1.0) for value in weights]
        pieces = separate.pieces
        if pieces is None:
            part = self.local_part(len(buffers[0]))
            pieces = [(part.start, buffers[self._comm.rank][part])]
        for start, values in pieces:
            piece = slice(start, start + len(values))
            into = None if separate.into is None else separate.into[piece]
            self._add([buffer[piece] for buffer in buffers], values, shares, into)
        flags.barrier()

    def _add(
        self,
        parts: list[np.ndarray],
        local: np.ndarray,
        shares: list[float] | None,
        into: np.ndarray | None,
    ) -> None:
        """Add the ranks' values in rank order; write each block of the sum while it is in cache.

        Args:
            parts: Views of the same elements in every rank's buffer.
            local: The values that this rank adds to the sum.
            shares: The factor of each rank's values in a weighted mean; None: compute a sum.
            into: The array for the result; None: write the result into all `parts`.
        """
        rank, places = self._comm.rank, parts if into is None else [into]
        # The sum can overwrite this rank's part of the buffer block by block. For a block-wise sum,
        # the input `local` must lie outside the buffer.
        first = 0 if into is not None or np.may_share_memory(local, parts[rank]) else rank
        step = BLOCK // local.itemsize
        for start in range(0, len(local), step):
            block = slice(start, start + step)
            values = [part[block] for part in parts]
            values[rank] = local[block]
            total = places[first][block]
            _sum(values, shares, total)
            for number, place in enumerate(places):
                if number != first:
                    place[block] = total

    def _find_place(self, buffer: np.ndarray) -> SharedRegion | None:
        """Return the location of a buffer in memory from `allocate`; None for other memory."""
        address = buffer.__array_interface__["data"][0]
        key = (address, buffer.nbytes, buffer.dtype.str)
        if key not in self._places:
            for number, (_, views) in enumerate(self._buffers):
                start = address - views[self._comm.rank].ctypes.data
                if start >= 0 and start + buffer.nbytes <= views[self._comm.rank].nbytes:
                    parts = [view[start : start + buffer.nbytes] for view in views]
                    location = f", from byte {start} of buffer {number}"
                    self._places[key] = _make_place(
                        [part.view(buffer.dtype) for part in parts], location
                    )
        return self._places.get(key)


def _make_place(views: list[np.ndarray], location: str) -> SharedRegion:
    return SharedRegion(views, location, zlib.crc32(location.encode()))


def _sum(values: list[np.ndarray], shares: list[float] | None, total: np.ndarray) -> None:
    """Add two or more arrays in the given order; multiply each array by its share before.

    Each array is multiplied by its share before the addition. The sum of large values can overflow
    even if their mean does not. The function adds 16-bit floats in float32 and rounds the sum once.

    Args:
        values: The arrays, all of one length and dtype.
        shares: The factor of each array; None: all factors are 1.
        total: The array into which the sum is written. The array `total` may be the first of
            `values`, but not a later one.
    """
    kind = np.dtype(np.float32) if is_16_bit_float(total.dtype) else total.dtype
    result = total if kind == total.dtype else np.empty(len(total), kind)
    if shares is None:
        np.add(values[0], values[1], out=result, dtype=kind)
        for value in values[2:]:
            np.add(result, value, out=result, dtype=kind)
    else:
        np.multiply(values[0], kind.type(shares[0]), out=result, dtype=kind)
        weighted = np.empty_like(result)
        for value, share in zip(values[1:], shares[1:], strict=True):
            np.multiply(value, kind.type(share), out=weighted, dtype=kind)
            np.add(result, weighted, out=result)
    if result is not total:
        total[...] = result.astype(total.dtype)


def _shared(comm: MPI.Intracomm, nbytes: int, common: bool = False) -> tuple[Any, list[np.ndarray]]:
    """Allocate a shared MPI window, zeroed and aligned to cache lines (collective).

    Args:
        comm: The communicator of the ranks of one host.
        nbytes: Bytes that each contributing rank allocates.
        common: Whether only rank 0 contributes memory; if false, each rank contributes.

    Returns:
        The window, and a view of each contributing rank's bytes.
    """
    from mpi4py import MPI

    size = -(-nbytes // LINE) * LINE + LINE
    try:
        window = MPI.Win.Allocate_shared(0 if common and comm.rank else size, 1, comm=comm)
    except MPI.Exception as error:
        if shortage := no_room(size * (1 if common else comm.size)):
            raise LabkitError(shortage) from error
        raise
    views = []
    for rank in range(1 if common else comm.size):
        memory: Any = window.Shared_query(rank)[0]
        views.append(_aligned(np.ndarray(size, np.uint8, memory), nbytes))
    window.Lock_all()
    if comm.rank < len(views):
        views[comm.rank][...] = 0
    comm.Barrier()
    return window, views


def _free(window: Any) -> None:
    """Free a window of `_shared` (collective); MPICH frees no window that is still locked."""
    window.Unlock_all()
    window.Free()


def no_room(nbytes: int, folder: Path = SHARED) -> str:
    """Return an error message if the folder has fewer free bytes than `nbytes`, or else ""."""
    free = shutil.disk_usage(folder).free if folder.is_dir() else nbytes
    if free >= nbytes:
        return ""
    return (
        f"ranks need {bytes_text(nbytes)} of shared memory, but {folder} has only "
        f"{bytes_text(free)} free; make it larger: mount -o remount,size=2G {folder}  # docker "
        "run --shm-size=2g"
    )


def _aligned(whole: np.ndarray, nbytes: int) -> np.ndarray:
    """Return a view of `nbytes` bytes that starts at the first cache-line boundary."""
    offset = -whole.ctypes.data % LINE
    return whole[offset : offset + nbytes]
