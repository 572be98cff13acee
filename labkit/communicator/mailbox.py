"""Messages from whoever sends: nobody has to know who is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.emulation import Emulation
from labkit.communicator.patience import Patience

if TYPE_CHECKING:
    from mpi4py import MPI

_HEADS, _VALUES = 1 << 13, (1 << 13) + 1  # tags, below those of schedules' users
WORDS = 12  # floats of a head that are the caller's


@dataclass(eq=False)
class Letter:
    """What one rank has sent to another.

    Attributes:
        source: rank.
        words: the caller's, (WORDS,).
        values: flat bytes; none where there were none.
    """

    source: int
    words: NDArray[np.float64]
    values: NDArray[np.uint8]
    _request: MPI.Request | None = None
    _moments: Iterator[float] | None = None
    _due: float = field(default=0.0)


class Mailbox:
    """What a rank sends and receives while it does something else; nothing here waits.

    Letters from one rank are delivered in the order in which they were posted; on an emulated
    network each when its flow has drained.

    Args:
        patience: of this rank, by whose communicator, meter and clock it goes.
        emulation: the network to emulate, or None.
    """

    def __init__(self, patience: Patience, emulation: Emulation | None) -> None:
        self._comm, self._traffic, self._clock = patience.comm, patience.traffic, patience.clock
        self._emulation = emulation
        self._leaving: list[tuple[MPI.Request, object]] = []  # with what must stay until then
        self._coming: deque[Letter] = deque()

    def post(self, to: int, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Begin to send; nobody writes into the values any more."""
        head = np.zeros(2 + WORDS)
        head[0], head[2 : 2 + len(words)] = values.nbytes, words
        if self._emulation:
            head[1] = self._emulation.depart(to, values.nbytes)
        self._leaving.append((self._comm.Isend(head, to, _HEADS), head))
        if values.nbytes:
            self._leaving.append((self._comm.Isend(values, to, _VALUES), values))
        self._traffic.messages += 1
        self._traffic.payload_bytes += values.nbytes
        self._traffic.wire_bytes += values.nbytes

    def collect(self) -> list[Letter]:
        """Letters that have been delivered since this was asked last."""
        self._leaving = [each for each in self._leaving if not each[0].Test()]
        self._look()
        found, waiting, behind = [], deque[Letter](), set[int]()
        for letter in self._coming:
            if letter.source in behind or not self._is_here(letter):
                behind.add(letter.source)
                waiting.append(letter)
            else:
                found.append(letter)
        self._coming = waiting
        return found

    @property
    def idle(self) -> bool:
        """Whether nothing is on its way from here."""
        self._leaving = [each for each in self._leaving if not each[0].Test()]
        return not self._leaving

    def _look(self) -> None:
        """Begin to receive what has come."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _HEADS, status):
            head, source = np.empty(2 + WORDS), status.Get_source()
            self._comm.Recv(head, source, _HEADS)
            letter = Letter(source, head[2:], np.empty(int(head[0]), np.uint8))
            if letter.values.nbytes:
                letter._request = self._comm.Irecv(letter.values, source, _VALUES)
            if self._emulation:
                sent = [(float(head[1]), source, letter.values.nbytes)]
                letter._moments = self._emulation.deliveries(sent)
            self._coming.append(letter)

    def _is_here(self, letter: Letter) -> bool:
        if letter._request is not None:
            if not letter._request.Test():
                return False
            letter._request = None
        while letter._moments is not None and letter._due <= self._clock.now():
            due = next(letter._moments, None)
            if due is None:
                letter._moments = None
            else:
                letter._due = due
        return letter._moments is None
