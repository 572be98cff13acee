"""Messages from whoever sends: nobody has to know who is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.emulation import Emulation
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.wire import Rules, Wire

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADS, _VALUES = 1 << 13, (1 << 13) + 1  # tags, below those of schedules' users
WORDS = 8  # floats of a head that are the caller's
LENGTH = 4 + WORDS  # floats of a head
Route: TypeAlias = tuple[int, int]  # the numbers of who sends and of who reads


@dataclass(eq=False)
class Letter:
    """What one has sent to another.

    Attributes:
        route: from whom to whom.
        words: the caller's, (WORDS,).
        values: flat bytes; none where there were none.
        told: their checksum, where one was asked for.
    """

    route: Route
    words: NDArray[np.float64]
    values: NDArray[np.uint8]
    told: int = 0
    _request: MPI.Request | None = None
    _moments: Iterator[float] | None = None
    _due: float = field(default=0.0)

    def is_here(self, now: float) -> bool:
        """Whether its values are, and on an emulated network would be."""
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

    def due_at(self, moments: Iterator[float]) -> None:
        """It is not here before these have passed, each asked for when the one before has."""
        self._moments = moments


class Mailbox:
    """What those at one rank send and receive while they do something else; nothing here waits.

    Letters from one rank are delivered in the order in which they were posted; on an emulated
    network each when its flow has drained.

    Args:
        patience: of this rank, by whose communicator, meter and clock it goes.
        emulation: the network to emulate, or None.
        hosts: the rank of each who sends or reads, by number.
        rules: what holds for all messages.
    """

    stay: ClassVar[bool] = False  # values are their reader's own

    def __init__(
        self,
        patience: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        rules: Rules | None = None,
    ) -> None:
        self._wire = Wire(patience.comm, rules, patience)
        self._comm, self._patience, self._clock = patience.comm, patience, patience.clock
        self._emulation, self._hosts = emulation, hosts
        self._leaving: list[tuple[MPI.Request, object]] = []  # with what must stay until then
        self._coming: deque[Letter] = deque()

    def post(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Begin to send; nobody writes into the values any more."""
        to, ticket = self._hosts[route[1]], 0.0
        sent = self._wire.outgoing(values, to)
        if sent is None:
            return
        if self._emulation:
            ticket = self._emulation.depart(to, values.nbytes)
        head = np.append(headed(route, ticket, words, values), self._wire.told(values))
        with self._patience.minding:
            self._leaving.append((self._comm.Isend(head, to, _HEADS), head))
            if values.nbytes:
                self._leaving.append((self._comm.Isend(sent, to, _VALUES), sent))
        self._patience.traffic.payload_bytes += values.nbytes
        self._patience.count_to(to, values.nbytes)

    def collect(self) -> list[Letter]:
        """Letters that have been delivered since this was asked last."""
        with self._patience.minding:
            self._leaving = [each for each in self._leaving if not each[0].Test()]
            self._look()
        found, waiting, behind = [], deque[Letter](), set[int]()
        for letter in self._coming:
            source = self._hosts[letter.route[0]]
            if source in behind or not letter.is_here(self._clock.now()):
                behind.add(source)
                waiting.append(letter)
            else:
                self._wire.compare(letter.values, letter.told, source)
                found.append(letter)
        self._coming = waiting
        return found

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way from here."""
        with self._patience.minding:
            self._leaving = [each for each in self._leaving if not each[0].Test()]
        return not self._leaving

    def free(self, route: Route) -> None:
        """Values are their reader's own."""

    def close(self) -> None:
        """Nothing is kept."""

    def _look(self) -> None:
        """Begin to receive what has come."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _HEADS, status):
            head, source = np.empty(LENGTH + 1), status.Get_source()
            self._comm.Recv(head, source, _HEADS)
            letter = opened(head, np.empty(int(head[0]), np.uint8), self._emulation, source)
            letter.told = int(head[-1])
            if letter.values.nbytes:
                letter._request = self._comm.Irecv(letter.values, source, _VALUES)
            self._coming.append(letter)


def headed(
    route: Route, ticket: float, words: NDArray[np.float64], values: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """What travels before the values: their bytes, whose they are, and the caller's words."""
    head = np.zeros(LENGTH)
    head[:4] = values.nbytes, ticket, *route
    head[4 : 4 + len(words)] = words
    return head


def opened(
    head: NDArray[np.float64], values: NDArray[np.uint8], emulation: Emulation | None, source: int
) -> Letter:
    """The letter of a head from a rank; on an emulated network its flow drains from now on."""
    route = int(head[2]), int(head[3])
    letter = Letter(route, head[4 : 4 + WORDS].copy(), values)
    if emulation:
        letter.due_at(emulation.deliveries([(float(head[1]), source, values.nbytes)]))
    return letter
