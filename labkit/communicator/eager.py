"""One-sided eager messages: the sender writes into the receiver's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import LabkitError
from labkit.communicator.emulation import Emulation
from labkit.communicator.mailbox import Letter, Route, make_header, open_letter
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.window import Window

LINE = 64  # bytes of a cache line
HEAD = 2 * LINE  # bytes at the start of a slot: message number and header

Posted: TypeAlias = tuple[Route, NDArray[np.float64], NDArray[np.uint8]]


class EagerMailbox:
    """A mailbox with one receive slot per route, which the sender fills with one-sided puts.

    A route is a pair of endpoints (sender, receiver). Slots are allocated once, and the receiver
    reads messages directly in their slots. A slot stays occupied until the receiver frees it, or
    until the receiver posts a message back to the sender. If the slot of a message is occupied, the
    message waits at its sender. With fixed slots, messages need no handshake, no copy at the
    receiver, and no allocation. Each route has its own slot, so that endpoints on the same rank do
    not block each other.

    Args:
        window: A function that allocates a window of a given number of bytes on this rank
            (collective).
        wait_policy: The wait policy of this rank, with its traffic meter and clock.
        emulation: The emulated network; None: the real network.
        hosts: The rank on which each endpoint runs, by endpoint number.
        routes: For each pair of endpoints (sender, receiver), the bytes of the longest message
            between them.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
        RDMA, EuroSys 2019: each tensor has a fixed memory area at its receiver, which polls a flag
        in this area. In the paper, the memory area contains only the values and the flag; here, a
        slot also contains a header of 96 bytes.
    """

    in_place: ClassVar[bool] = True  # whether the receiver reads values without copying them

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
        self._slots: dict[Route, int] = {}  # offset of each slot in the receiver's memory, in bytes
        # This mapping contains the offset of each route's read count in the sender's memory, in
        # bytes.
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
        self._unfreed: set[Route] = set()  # routes with a slot that the receiver has not yet freed

    def post(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Send a message, and free the receive slot of the route in the opposite direction.

        Args:
            route: The endpoint numbers of sender and receiver.
            words: Header words that the caller may use, at most `WORDS` of them.
            values: The bytes of the message, flat. The bytes must not change while the message
                waits for a free slot.

        Raises:
            LabkitError: The message has more bytes than its route's slot can hold.
        """
        self._validate_size(route, values.nbytes)
        self.free((route[1], route[0]))
        self._outbox.append((route, words, values))
        self._deliver()

    def free(self, route: Route) -> None:
        """Free the slot of a route; the receiver calls this after it has used the values."""
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
                # This call makes the values visible that the sender wrote before the message
                # number.
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

    # --- memory layout and transfer, which `RendezvousMailbox` overrides ------------------------

    def _slot_bytes(self, capacity: int) -> int:
        """Return the size in bytes of a slot at the receiver, without the slot's header."""
        return lines(capacity)

    def _send_bytes(self, capacity: int) -> int:
        """Return the size in bytes of the send buffer at the sender, without the read count."""
        return 0

    def _validate_size(self, route: Route, nbytes: int) -> None:
        if nbytes > self._capacities[route]:
            raise LabkitError(
                f"a message of {nbytes} bytes exceeds its receive slot of "
                f"{self._capacities[route]} bytes; use transport='two_sided' or "
                "'one_sided_dynamic', whose messages may have any length"
            )

    def _receive(self, route: Route) -> Letter | None:
        """Return the message in a slot, or None if further parts of it have yet to arrive."""
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
        # The message number is written last. A receiver that reads the new number therefore finds
        # the complete message.
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
