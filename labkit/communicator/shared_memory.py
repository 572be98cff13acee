"""Sums of the ranks of one host: each adds up its part, reading the others' memory in place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator.numbers import is_narrow
from labkit.communicator.status_board import RankDied
from labkit.communicator.wait_policy import WaitPolicy
from labkit.schedules import boundaries

if TYPE_CHECKING:
    from mpi4py import MPI

Piece: TypeAlias = tuple[int, np.ndarray]

BLOCK = 1 << 18  # bytes that stay in a core's cache between adding and writing
LINE = 64  # bytes of a cache line: no two ranks write to the same


class Aside(NamedTuple):
    """What of a sum lies elsewhere than in the ranks' buffers, which spares copies.

    Attributes:
        pieces: (offset, values) that make up `own_part` of the buffer and need not be copied into
            it; None: they are there.
        into: the same elements of a memory from `allocate(common=True)`, where the sum is written
            once for all ranks, until they come to the next call; None: into every buffer.
    """

    pieces: Sequence[Piece] | None = None
    into: np.ndarray | None = None


class Place(NamedTuple):
    """The same elements in every rank's memory.

    Attributes:
        views: of each rank's.
        told: where they are, in words; ranks must agree on it.
        code: 32 bits of that.
    """

    views: list[np.ndarray]
    told: str
    code: int


class Flags:
    """By which ranks of one host see how far each has come, in which call, with which weight.

    They are made together (collective).

    Args:
        patience: how this rank waits; its meter counts the seconds.

    Attributes:
        weights: of each rank.
    """

    def __init__(self, patience: WaitPolicy) -> None:
        self._rank, self._patience, self._phase = patience.rank, patience, 0
        self._window, views = _shared(patience.comm, LINE)
        self._phases = [view[:8].view(np.int64) for view in views]
        self.weights = [view[8:16].view(np.float64) for view in views]
        self._codes = [view[16:24].view(np.int64) for view in views]
        self._vote = np.zeros(1, np.int64)  # the last one that was first
        self._ballot = views[0].ctypes.data - self._window.Shared_query(0)[0].address + 24

    def agree(self, told: str = "", code: int = 0) -> None:
        """Wait until every rank has come to this call.

        Args:
            told: where it works, in words.
            code: of these.

        Raises:
            Mismatch: ranks are in different calls, or work in different places.
        """
        own = self._patience.code ^ code
        self._codes[self._rank][0] = own  # stays until all have read it: nobody is ahead by a call
        self.meet()
        if any(other[0] != own for other in self._codes):
            self._patience.disagree(told)

    def agree_to_go_on(self, told: str) -> None:
        """Likewise, and then all ranks go on from here or none does.

        One that waits may hear of a failure on another host while the others, who have not, go on
        to where they need it. So each votes, and the vote that is first is everybody's.
        """
        try:
            self.agree(told)
        except RankDied:
            raise  # which has woken the others, wherever they are
        except LabkitError:
            if not self._first_vote(goes_on=False):
                raise
        else:
            if not self._first_vote(goes_on=True):
                self.meet()  # where who has left never comes: this rank is told why

    def _first_vote(self, goes_on: bool) -> bool:
        """Vote in this phase; whether who was the first to do so goes on."""
        ndarray, array1_d = (
            np.array([self._phase if goes_on else -self._phase]),
            np.empty(1, np.int64),
        )
        self._window.Compare_and_swap(ndarray, self._vote, array1_d, 0, self._ballot)
        self._window.Flush(0)
        self._vote = ndarray if array1_d[0] == self._vote[0] else array1_d
        return bool(self._vote[0] > 0)

    def meet(self) -> None:
        """Wait until every rank has come to this phase; writes before it are then visible."""
        self._window.Sync()
        self._phase += 1
        self._phases[self._rank][0] = self._phase
        polls, clock = 0, self._patience.clock
        start = clock.now()
        while min(int(phase[0]) for phase in self._phases) < self._phase:
            self._patience.pause(polls)
            polls += 1
        self._patience.traffic.wait_seconds += clock.now() - start
        self._window.Sync()

    def close(self) -> None:
        """Free them (collective)."""
        self._phases.clear()
        self._codes.clear()
        self.weights.clear()
        self._window.Free()


class SharedMemory:
    """Buffers that all ranks of a host see, and their sums.

    Rank r adds up part r of all buffers, in order of rank, and writes the sum into each of them:
    p-1 reads and p writes of n/p bytes, no message; or one write, where all read one memory.
    Between the phases ranks wait for each other's flags, which are made when first needed.

    Args:
        patience: how this rank waits for a flag; of the ranks of its host.

    Attributes:
        patience: as given.
    """

    def __init__(self, patience: WaitPolicy) -> None:
        self._comm, self.patience = patience.comm, patience
        self._flags: Flags | None = None
        self._buffers: list[tuple[Any, list[np.ndarray]]] = []
        self._commons: list[Any] = []
        self._staging: list[np.ndarray] | None = None
        self._known: dict[tuple[int, int, str], Place] = {}  # by address

    def allocate(self, nbytes: int, common: bool = False) -> np.ndarray:
        """This rank's buffer of so many bytes, which the others of its host see (collective).

        Args:
            nbytes: of the buffer.
            common: one memory for all ranks instead.
        """
        self._ready()
        window, views = _shared(self._comm, nbytes, common)
        if common:
            self._commons.append(window)
        else:
            self._buffers.append((window, views))
        own: np.ndarray = views[0 if common else self._comm.rank]
        return own

    def allreduce(
        self, buffer: np.ndarray, weight: float | None = None, aside: Aside | None = None
    ) -> None:
        """Sum the ranks' flat buffers of one length, in place.

        A buffer from `allocate` is used where it is; any other is copied in and out.

        Args:
            buffer: this rank's values.
            weight: of this rank, for the weighted mean instead of the sum.
            aside: what of it lies elsewhere; only for a buffer from `allocate`.
        """
        self._at_place(buffer, partial(self._reduce, weight, aside or Aside()))

    def allreduce_around(
        self, buffer: np.ndarray, part: slice, between: Callable[[np.ndarray], None]
    ) -> None:
        """Replace every rank's buffer by what `between` makes of their sum, in place.

        Args:
            buffer: as for `allreduce`.
            part: the elements that this rank adds up and hands on, or none; no two have the same.
            between: changes them, in a memory like the buffer.
        """
        self._at_place(buffer, partial(self._reduce_around, part, between))

    def _at_place(self, buffer: np.ndarray, work: Callable[[Flags, Place], None]) -> None:
        """Carry out a sum where the buffer is, or in memory where all see it."""
        self.patience.begin()
        flags = self._ready()
        place = self._place_of(buffer)
        if place is not None:
            work(flags, place)
            return
        if self._staging is None or self._staging[0].nbytes < buffer.nbytes:
            flags.agree_to_go_on(", in new memory")  # which MPI makes without looking around
            self.patience.check_failures()
            with self.patience.minding:
                self.allocate(buffer.nbytes)
            self._staging = self._buffers[-1][1]
        views = [view[: buffer.nbytes].view(buffer.dtype) for view in self._staging]
        staged = views[self._comm.rank]
        staged[...] = buffer
        work(flags, _place(views, ", in memory of its own"))
        buffer[...] = staged  # nobody writes here before this rank comes to the next call

    def close(self) -> None:
        """Free all windows (collective)."""
        self._known.clear()
        for window, views in self._buffers:
            views.clear()
            window.Free()
        for window in self._commons:
            window.Free()
        if self._flags is not None:
            self._flags.close()

    def own_part(self, length: int) -> slice:
        """The elements of a buffer that this rank adds up."""
        edges = boundaries(length, self._comm.size)
        return slice(int(edges[self._comm.rank]), int(edges[self._comm.rank + 1]))

    def _ready(self) -> Flags:
        """The flags, which all ranks make together in the first call that wants them."""
        if self._flags is None:
            self._flags = Flags(self.patience)
        return self._flags

    def _reduce_around(
        self, part: slice, between: Callable[[np.ndarray], None], flags: Flags, place: Place
    ) -> None:
        flags.agree(place.told, place.code)
        whole, parts = place.views[0], [view[part] for view in place.views]
        if len(parts) > 1:  # in the first one's memory: nobody else touches this part there
            self._add(parts, parts[self._comm.rank], None, parts[0])
        between(whole)
        for other in parts[1:]:
            other[...] = parts[0]
        flags.meet()

    def _reduce(self, weight: float | None, aside: Aside, flags: Flags, place: Place) -> None:
        buffers = place.views
        if weight is not None:
            flags.weights[self._comm.rank][0] = weight
        if aside.into is None:
            flags.agree(place.told, place.code)
        else:
            flags.agree(f"{place.told}, into common memory", ~place.code)
        shares = None
        if weight is not None:
            weights = [float(each[0]) for each in flags.weights]
            shares = [each / (sum(weights) or 1.0) for each in weights]
        pieces = aside.pieces
        if pieces is None:
            part = self.own_part(len(buffers[0]))
            pieces = [(part.start, buffers[self._comm.rank][part])]
        for start, own in pieces:
            piece = slice(start, start + len(own))
            into = None if aside.into is None else aside.into[piece]
            self._add([buffer[piece] for buffer in buffers], own, shares, into)
        flags.meet()

    def _add(
        self,
        parts: list[np.ndarray],
        own: np.ndarray,
        shares: list[float] | None,
        into: np.ndarray | None,
    ) -> None:
        """Add up in order of rank, or weighted, block by block: what is added is still in the cache
        when it is written.

        Args:
            parts: the ranks' memory of the same elements.
            own: the values of this rank, there or elsewhere.
            shares: of the ranks.
            into: the place of the sum; None: every part.
        """
        rank, places = self._comm.rank, parts if into is None else [into]
        # Of own values that are elsewhere, nobody reads the place before it is written.
        first = 0 if into is not None or np.may_share_memory(own, parts[rank]) else rank
        step = BLOCK // own.itemsize
        for start in range(0, len(own), step):
            block = slice(start, start + step)
            values = [part[block] for part in parts]
            values[rank] = own[block]
            total = places[first][block]
            _sum(values, shares, total)
            for number, place in enumerate(places):
                if number != first:
                    place[block] = total

    def _place_of(self, buffer: np.ndarray) -> Place | None:
        """Where the buffer lies, when it does so in an allocated memory."""
        address = buffer.__array_interface__["data"][0]
        key = (address, buffer.nbytes, buffer.dtype.str)
        if key not in self._known:
            for number, (_, views) in enumerate(self._buffers):
                start = address - views[self._comm.rank].ctypes.data
                if start >= 0 and start + buffer.nbytes <= views[self._comm.rank].nbytes:
                    parts = [view[start : start + buffer.nbytes] for view in views]
                    told = f", from byte {start} of memory {number}"
                    self._known[key] = _place([part.view(buffer.dtype) for part in parts], told)
        return self._known.get(key)


def _place(views: list[np.ndarray], told: str) -> Place:
    return Place(views, told, zlib.crc32(told.encode()))


def _sum(values: list[np.ndarray], shares: list[float] | None, total: np.ndarray) -> None:
    """The sum of two or more arrays in their order, weighted where shares are given.

    Each is weighted before it is added: the sum of large values would overflow where their mean
    does not. Floats of 16 bits are added in float32 and rounded once. `total` may be the first of
    the values, or none of them.
    """
    kind = np.dtype(np.float32) if is_narrow(total.dtype) else total.dtype
    found = total if kind == total.dtype else np.empty(len(total), kind)
    if shares is None:
        np.add(values[0], values[1], out=found, dtype=kind)
        for value in values[2:]:
            np.add(found, value, out=found, dtype=kind)
    else:
        np.multiply(values[0], kind.type(shares[0]), out=found, dtype=kind)
        weighted = np.empty_like(found)
        for value, share in zip(values[1:], shares[1:], strict=True):
            np.multiply(value, kind.type(share), out=weighted, dtype=kind)
            np.add(found, weighted, out=found)
    if found is not total:
        total[...] = found.astype(total.dtype)


def _shared(comm: MPI.Intracomm, nbytes: int, common: bool = False) -> tuple[Any, list[np.ndarray]]:
    """A window with so many bytes of each rank, aligned to cache lines; views on all of them.

    Common: of rank 0 alone.
    """
    from mpi4py import MPI

    size = -(-nbytes // LINE) * LINE + LINE
    window = MPI.Win.Allocate_shared(0 if common and comm.rank else size, 1, comm=comm)
    views = []
    for rank in range(1 if common else comm.size):
        memory: Any = window.Shared_query(rank)[0]
        views.append(_aligned(np.ndarray(size, np.uint8, memory), nbytes))
    window.Lock_all()
    if comm.rank < len(views):
        views[comm.rank][...] = 0
    comm.Barrier()
    return window, views


def _aligned(whole: np.ndarray, nbytes: int) -> np.ndarray:
    """So many of the bytes, from the first cache line that begins there."""
    offset = -whole.ctypes.data % LINE
    return whole[offset : offset + nbytes]
