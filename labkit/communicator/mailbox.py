"""Two-sided mailboxes, which receive messages (letters) from any sender, in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import MessageRules, MpiWire

if TYPE_CHECKING:
    from mpi4py import MPI

# The constants `_HEADS` and `_VALUES` are MPI tags; the class `Messages` uses only higher tags.
_HEADS, _VALUES = 1 << 13, (1 << 13) + 1
# The constant `WORDS` is the number of floats in a message header that the caller may set.
WORDS = 8
LENGTH = 4 + WORDS  # The constant `LENGTH` is the number of floats in a message header.
# A `Route` is a pair of endpoint numbers: the sender's number and the receiver's number.
Route: TypeAlias = tuple[int, int]


@dataclass(eq=False)
class Letter:
    """A message from one endpoint (such as a worker or a server) to another endpoint.

    Attributes:
        route: The endpoint numbers of the sender and the receiver.
        words: The floats of the header that the caller has set, shape (WORDS,).
        values: The values of the message as a flat byte array; the array may be empty.
        checksum: The checksum of the values, computed by the sender; 0 if checksums are not used.
    """

    route: Route
    words: NDArray[np.float64]
    values: NDArray[np.uint8]
    checksum: int = 0
    _request: MPI.Request | None = None
    _moments: Iterator[float] | None = None
    _due: float = field(default=0.0)

    def has_arrived(self, now: float) -> bool:
        """Return whether the message has arrived.

        Args:
            now: The current time on the rank's clock, in seconds.
        """
        if self._request is not None:
            if not self._request.Test():
                return False
            self._request = None
        while self._moments is not None and self._due <= now:
            due = next(self._moments, None)
            if due is None:
                self._moments = None
            else:
                self._due = due
        return self._moments is None

    def delay_until(self, moments: Iterator[float]) -> None:
        """Delay the arrival of this message until a sequence of wake-up times has passed.

        Args:
            moments: An iterator of wake-up times. The message waits for each time of the iterator
                in turn.
        """
        self._moments = moments


class Mailbox:
    """A mailbox for all endpoints on one rank; none of its methods blocks.

    Messages from one rank arrive in the order in which that rank has posted them. On an emulated
    network, a message arrives when the network has delivered the message's last byte.

    Args:
        wait_policy: The wait policy of this rank, with its communicator, traffic meter and clock.
        emulation: The emulated network; None: the real network.
        hosts: The rank on which each endpoint runs, by endpoint number.
        rules: Checksum and fault-injection rules, which apply to all messages.
    """

    # The attribute `in_place` tells whether the receiver reads a message's values without copying
    # them.
    in_place: ClassVar[bool] = False

    def __init__(
        self,
        wait_policy: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        rules: MessageRules | None = None,
    ) -> None:
        self._wire = MpiWire(wait_policy.comm, rules, wait_policy)
        self._comm, self._wait_policy, self._clock = (
            wait_policy.comm,
            wait_policy,
            wait_policy.clock,
        )
        self._emulation, self._hosts = emulation, hosts
        # The list `_pending_sends` contains each pending MPI send request, together with the buffer
        # that the request sends.
        self._pending_sends: list[tuple[MPI.Request, object]] = []
        self._incoming: deque[Letter] = deque()

    def post(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Begin to send a message; its values must not change until the send is complete."""
        to, ticket = self._hosts[route[1]], 0.0
        sent = self._wire.outgoing(values, to)
        if sent is None:
            return
        if self._emulation:
            ticket = self._emulation.depart(to, values.nbytes)
        head = np.append(
            make_header(route, ticket, words, values), self._wire.header_checksum(values)
        )
        with self._wait_policy.failure_guard:
            self._pending_sends.append((self._comm.Isend(head, to, _HEADS), head))
            if values.nbytes:
                self._pending_sends.append((self._comm.Isend(sent, to, _VALUES), sent))
        self._wait_policy.traffic.payload_bytes += values.nbytes
        self._wait_policy.count_to(to, values.nbytes)

    def collect(self) -> list[Letter]:
        """Return the messages (`Letter` objects) that have arrived since the last call."""
        with self._wait_policy.failure_guard:
            self._pending_sends = [entry for entry in self._pending_sends if not entry[0].Test()]
            self._receive_headers()
        arrived, waiting, behind = [], deque[Letter](), set[int]()
        for letter in self._incoming:
            source = self._hosts[letter.route[0]]
            if source in behind or not letter.has_arrived(self._clock.now()):
                behind.add(source)
                waiting.append(letter)
            else:
                self._wire.compare(letter.values, letter.checksum, source)
                arrived.append(letter)
        self._incoming = waiting
        return arrived

    @property
    def idle(self) -> bool:
        """Whether all sends of this rank are complete."""
        with self._wait_policy.failure_guard:
            self._pending_sends = [entry for entry in self._pending_sends if not entry[0].Test()]
        return not self._pending_sends

    def free(self, route: Route) -> None:
        """Do nothing, because the receiver already owns a copy of the values."""

    def close(self) -> None:
        """Do nothing, because a two-sided mailbox has no resources to free."""

    def _receive_headers(self) -> None:
        """Receive all headers that have arrived, and begin to receive the messages' values."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _HEADS, status):
            head, source = np.empty(LENGTH + 1), status.Get_source()
            self._comm.Recv(head, source, _HEADS)
            letter = open_letter(head, np.empty(int(head[0]), np.uint8), self._emulation, source)
            letter.checksum = int(head[-1])
            if letter.values.nbytes:
                letter._request = self._comm.Irecv(letter.values, source, _VALUES)
            self._incoming.append(letter)


def make_header(
    route: Route, ticket: float, words: NDArray[np.float64], values: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """Return a header with byte count, emulation ticket, route, and the caller's words."""
    head = np.zeros(LENGTH)
    head[:4] = values.nbytes, ticket, *route
    head[4 : 4 + len(words)] = words
    return head


def open_letter(
    head: NDArray[np.float64], values: NDArray[np.uint8], emulation: Emulation | None, source: int
) -> Letter:
    """Return the message whose header came from rank `source`; start its emulated transfer."""
    route = int(head[2]), int(head[3])
    letter = Letter(route, head[4 : 4 + WORDS].copy(), values)
    if emulation:
        letter.delay_until(emulation.deliveries([(float(head[1]), source, values.nbytes)]))
    return letter
