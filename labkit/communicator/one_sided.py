"""Windows, which are memory of a rank that other ranks read and write by one-sided access."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import LabkitError
from labkit.communicator.emulation import Emulation
from labkit.communicator.mailbox import LENGTH, Letter, Route, make_header, open_letter
from labkit.communicator.wait_policy import WaitPolicy

if TYPE_CHECKING:
    pass


# The constant `_PART` is the maximum number of bytes that one `get` operation reads from another
# host. In Open MPI 5.0.11 over TCP, a `get` request is as long as its data. Above 64 KiB, a `get`
# request is twice as long as the data.
_PART = 1 << 16


class Window:
    """Memory for one-sided access: `put` and `get` move bytes without a call of the target rank.

    A call of `put` or `get` returns after the data have arrived. On an emulated network, `put` and
    `get` return at the emulated arrival time. The calling ranks must agree among themselves where
    and when each rank writes. If all ranks run on one host, the window is shared memory. In shared
    memory, each access copies the data once.

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
        # The list `_views` contains a view of each rank's memory. If ranks run on several hosts,
        # the list `_views` is empty.
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
        """Fill an array with bytes from the memory of a rank, beginning at byte `offset`."""
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

        Over TCP, the MPI library of the memory's owner performs the accesses. The MPI library
        performs accesses only while the owner of the memory calls MPI. Without MPI calls, a rank
        that only polls its own memory would wait forever.
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


LINE = 64  # The constant `LINE` is the size of a cache line in bytes.
HEAD = 2 * LINE  # The first `HEAD` bytes of a slot contain the message number and the header.

Posted: TypeAlias = tuple[Route, NDArray[np.float64], NDArray[np.uint8]]


class EagerMailbox:
    """A mailbox with one receive slot per route, which the sender fills with one-sided puts.

    A route is a pair of endpoints (sender, receiver). Slots are allocated once, and the receiver
    reads messages directly in their slots. A slot stays occupied until the receiver frees the slot.
    A message from the receiver back to the sender also frees the slot. If the slot of a message is
    occupied, the message waits at its sender. With fixed slots, messages need no handshake, no copy
    at the receiver, and no allocation. Each route has its own slot, so that endpoints on the same
    rank do not block each other.

    Args:
        window: A function that allocates a window of a given number of bytes on this rank
            (collective).
        wait_policy: The wait policy of this rank, with its traffic meter and clock.
        emulation: The emulated network; None: the real network.
        hosts: The rank on which each endpoint runs, by endpoint number.
        routes: For each pair of endpoints (sender, receiver), the bytes of the longest message
            between them.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
        RDMA, EuroSys 2019: each tensor has a fixed memory area at its receiver. In Xue et al. 2019,
        the receiver polls a flag in the memory area. In Xue et al. 2019, the memory area contains
        only the values and the flag; in labkit, a slot also contains a header of 96 bytes.
    """

    # The attribute `in_place` tells whether the receiver reads a message's values without copying
    # them.
    in_place: ClassVar[bool] = True

    def __init__(
        self,
        window: Callable[[int], Window],
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        routes: Mapping[Route, int],
    ) -> None:
        self._wait_policy, self._emulation, self._hosts = wait_policy, emulation, hosts
        self._capacities = routes
        # The dict `_slots` maps each route (sender, receiver) to its slot. A slot is given by its
        # byte offset in the receiver's memory.
        self._slots: dict[Route, int] = {}
        # The dict `_reads` maps each route to its counter of read messages. A counter is given by
        # its byte offset in the sender's memory.
        self._reads: dict[Route, int] = {}
        sizes = [0] * wait_policy.size
        for route, capacity in routes.items():
            source, reader = (hosts[number] for number in route)
            self._slots[route] = sizes[reader]
            sizes[reader] += HEAD + self._slot_bytes(capacity)
            self._reads[route] = sizes[source]
            sizes[source] += LINE + self._send_bytes(capacity)
        self._window = window(sizes[wait_policy.rank])
        self._sent = dict.fromkeys((r for r in routes if hosts[r[0]] == wait_policy.rank), 0)
        self._received = dict.fromkeys((r for r in routes if hosts[r[1]] == wait_policy.rank), 0)
        memory = self._window.memory
        self._read = {r: memory[self._reads[r] :][:8].view(np.float64) for r in self._sent}
        self._heads = {r: memory[self._slots[r] :][:HEAD].view(np.float64) for r in self._received}
        self._outbox: deque[Posted] = deque()
        self._incoming: list[Letter] = []
        # The set `_unfreed` contains the routes (sender, receiver) whose slot the receiver has not
        # yet freed.
        self._unfreed: set[Route] = set()

    def post(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Send a message, and free the slot of the last message in the opposite direction.

        Args:
            route: The endpoint numbers of sender and receiver.
            words: Header words that the caller may use, at most `WORDS` of them.
            values: The bytes of the message, as a flat array. The bytes must not change while the
                message waits for a free slot.

        Raises:
            LabkitError: The message has more bytes than its route's slot can hold.
        """
        self._validate_size(route, values.nbytes)
        self.free((route[1], route[0]))
        self._outbox.append((route, words, values))
        self._deliver()

    def free(self, route: Route) -> None:
        """Free the slot of a route; the receiver calls `free` after it has used the values."""
        if route in self._unfreed:
            self._unfreed.remove(route)
            read = np.array([float(self._received[route])])
            self._window.write(read, self._hosts[route[0]], self._reads[route])

    def collect(self) -> list[Letter]:
        """Return the messages (`Letter` objects) that have arrived since the last call."""
        self._window.progress()
        self._deliver()
        for route, head in self._heads.items():
            if head[0] > self._received[route]:
                # The method `sync` makes the values visible that the sender wrote before the
                # message number.
                self._window.sync()
                self._received[route] += 1
                if (letter := self._receive(route)) is not None:
                    self._incoming.append(letter)
        if not self._incoming:
            return []
        now = self._wait_policy.clock.now()
        letters = [letter for letter in self._incoming if letter.has_arrived(now)]
        self._incoming = [letter for letter in self._incoming if letter not in letters]
        for letter in letters:
            self._unfreed.add(letter.route)
            if not (self.in_place and letter.values.nbytes):
                self.free(letter.route)
        return letters

    @property
    def idle(self) -> bool:
        """Whether no message of this rank is waiting for a free slot."""
        self._window.progress()
        self._deliver()
        return not self._outbox

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The window memory of this rank, which other ranks write to or read from."""
        return self._window.memory

    def close(self) -> None:
        """Wait at a barrier, then free the window memory of all ranks (collective)."""
        self._wait_policy.barrier("the barrier after the last one-sided message")
        self._read, self._heads = {}, {}
        self._window.close()

    def _slot_bytes(self, capacity: int) -> int:
        """Return the size in bytes of a slot at the receiver, without the slot's header."""
        return lines(capacity)

    def _send_bytes(self, capacity: int) -> int:
        """Return the bytes of the send buffer at the sender, without the 8-byte read counter."""
        return 0

    def _validate_size(self, route: Route, nbytes: int) -> None:
        if nbytes > self._capacities[route]:
            raise LabkitError(
                f"a message of {nbytes} bytes exceeds its receive slot of "
                f"{self._capacities[route]} bytes; use transport='two_sided' or "
                "'one_sided_dynamic', whose messages may have any length"
            )

    def _receive(self, route: Route) -> Letter | None:
        """Return the message in a slot, or None if the message is not yet complete."""
        head = self._heads[route][1:]
        values = self._window.memory[self._slots[route] + HEAD :][: int(head[0])]
        return open_letter(head, values, self._emulation, self._hosts[route[0]])

    def _write(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        """Write a message into its empty slot; return whether the complete message is written."""
        at, to, ticket = self._slots[route], self._hosts[route[1]], 0.0
        if self._emulation:
            ticket = self._emulation.depart(to, values.nbytes)
        if values.nbytes:
            self._window.write(values, to, at + HEAD)
        self._write_header(route, make_header(route, ticket, words, values))
        self._count(route, values.nbytes)
        return True

    def _write_header(self, route: Route, head: NDArray[np.float64]) -> None:
        at, to = self._slots[route], self._hosts[route[1]]
        self._sent[route] += 1
        self._window.write(head, to, at + 8)
        # The sender writes the message number last. A receiver that sees the new number therefore
        # finds the complete message.
        self._window.write(np.array([float(self._sent[route])]), to, at)

    def _count(self, route: Route, nbytes: int) -> None:
        self._wait_policy.traffic.payload_bytes += nbytes
        self._wait_policy.count_to(self._hosts[route[1]], nbytes)

    def _deliver(self) -> None:
        """Write waiting messages into empty slots; messages of the same route stay in order."""
        waiting: deque[Posted] = deque()
        behind: set[Route] = set()
        for posted in self._outbox:
            route = posted[0]
            if (
                route in behind
                or self._read[route][0] < self._sent[route]
                or not self._write(*posted)
            ):
                behind.add(route)
                waiting.append(posted)
        self._outbox = waiting


def lines(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of the cache line size."""
    return -(-nbytes // LINE) * LINE


MIN_SEND_BYTES = 1 << 16
# A notice, which announces one part of a message, consists of a header and three numbers. A notice
# contains the message part's offset in the sender's memory. A notice also contains the part's
# length in bytes and start within the message.
_PLACE = LENGTH
_NOTICE = _PLACE + 3
# The message number and the notice, which announces a message part, must fit into a slot's header.
assert 8 * (1 + _NOTICE) <= HEAD


class RendezvousMailbox(EagerMailbox):
    """A mailbox whose receivers read the values from the senders' memory.

    Each route (sender, receiver) has a fixed slot for notices in the receiver's memory. Each route
    also has a send buffer in the sender's memory. The sender copies values into its send buffer,
    and writes a notice. The notice contains the offset and the length of the values in bytes. The
    receiver of a notice then allocates memory and reads the values. Values that are longer than the
    send buffer are sent in several parts. The receiver need not know the length of values in
    advance. The sender's notice contains the length of the values.

    On an emulated network, one message takes three latencies. The notice, the read request and the
    transfer each take one latency. A message of `EagerMailbox` takes only one latency.

    Args:
        window, wait_policy, emulation, hosts: The same arguments as those of `EagerMailbox`.
        routes: The send buffer's bytes for each pair of endpoints (sender, receiver). Each send
            buffer has at least 64 KiB.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
    RDMA, EuroSys 2019: the sender writes metadata to a fixed memory area. In Xue et al. 2019, the
    metadata describe a tensor of unknown shape. In Xue et al. 2019, the receiver then allocates
    memory and reads the tensor. In Xue et al.
    2019, the tensor is in RDMA-registered memory from the start; in labkit, the sender copies the
    values into such memory.
    """

    # The attribute `in_place` tells whether the receiver reads a message's values without copying
    # them.
    in_place: ClassVar[bool] = False

    def __init__(
        self,
        window: Callable[[int], Window],
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        routes: Mapping[Route, int],
    ) -> None:
        super().__init__(window, wait_policy, emulation, hosts, routes)
        self._bytes_sent: dict[
            Route, int
        ] = {}  # bytes of the current message that were already sent in parts
        self._partial: dict[Route, NDArray[np.uint8]] = {}

    def _slot_bytes(self, capacity: int) -> int:
        return 0

    def _send_bytes(self, capacity: int) -> int:
        return lines(max(capacity, MIN_SEND_BYTES))

    def _validate_size(self, route: Route, nbytes: int) -> None:
        """Accept a message of any size, because long values are sent in parts."""

    def _write(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        begin, offset = self._bytes_sent.pop(route, 0), self._reads[route] + LINE
        part = values[begin:][: self._send_bytes(self._capacities[route])]
        self._window.memory[offset : offset + part.nbytes] = part
        notice = np.zeros(_NOTICE)
        notice[:_PLACE] = make_header(route, self._wait_policy.clock.now(), words, values)
        notice[_PLACE:] = offset, part.nbytes, begin
        # The values must become visible to the receiver before the notice that announces the
        # values.
        self._window.sync()
        self._write_header(route, notice)
        if begin == 0:
            self._count(route, values.nbytes)
        if begin + part.nbytes == values.nbytes:
            return True
        self._bytes_sent[route] = begin + part.nbytes
        return False

    def _receive(self, route: Route) -> Letter | None:
        head, source = self._heads[route][1:], self._hosts[route[0]]
        offset, nbytes, begin = (int(word) for word in head[_PLACE:_NOTICE])
        if begin == 0:
            self._partial[route] = np.empty(int(head[0]), np.uint8)
        values = self._partial[route]
        if nbytes:
            self._window.read(values[begin : begin + nbytes], source, offset)
        if begin + nbytes < values.nbytes:
            self._unfreed.add(route)
            self.free(route)  # A free slot lets the sender send the next part of the values.
            return None
        letter = open_letter(head, self._partial.pop(route), None, source)
        if self._emulation:
            letter.delay_until(
                self._fetch_moments(self._emulation, source, values.nbytes, float(head[1]))
            )
        return letter

    def _fetch_moments(
        self, emulation: Emulation, source: int, nbytes: int, sent_at: float
    ) -> Iterator[float]:
        """Yield the time when the request arrives, then wake-up times until the values arrive."""
        yield sent_at + 2 * emulation.network.latency
        yield from emulation.transfer(source, self._wait_policy.rank, nbytes)
