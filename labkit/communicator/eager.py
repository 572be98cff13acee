"""Letters that are written straight into the memory of who reads them: one-sided."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import LabkitError
from labkit.communicator.emulation import Emulation
from labkit.communicator.mailbox import Letter, Route, headed, opened
from labkit.communicator.wait_policy import WaitPolicy
from labkit.communicator.window import Window

LINE = 64  # bytes of a cache line
HEAD = 2 * LINE  # the number of the letter, and its head

Posted: TypeAlias = tuple[Route, NDArray[np.float64], NDArray[np.uint8]]


class Slots:
    """A mailbox with one slot a route: who sends puts, who reads takes no part.

    Memory is placed once, at the begin, and values are read where they were put: they stay until
    their reader posts a letter to who sent them, or frees them. A letter for a slot that is still
    full waits at its sender. So there is no handshake, no copy on the reader's side, and nothing
    to allocate. A slot for each route, and not for each pair of ranks: who stands on one rank must
    not wait for each other's letters to be read.

    Args:
        window: makes memory of so many bytes at this rank (collective).
        patience: of this rank, by whose meter and clock it goes.
        emulation: the network to emulate, or None.
        hosts: the rank of each who sends or reads, by number.
        routes: bytes of the longest values, by (who sends, who reads).

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
    RDMA, EuroSys 2019: tensors placed statically at their receivers, which poll a flag. Theirs has
    the flag alone behind the values; here the words of the letter, 96 bytes, come along.
    """

    stay: ClassVar[bool] = True  # values are read where they were put

    def __init__(
        self,
        window: Callable[[int], Window],
        patience: WaitPolicy,
        emulation: Emulation | None,
        hosts: Sequence[int],
        routes: Mapping[Route, int],
    ) -> None:
        self._patience, self._emulation, self._hosts = patience, emulation, hosts
        self._capacities = routes
        self._slots: dict[Route, int] = {}  # bytes in the memory of the reader
        self._reads: dict[Route, int] = {}  # bytes in that of the sender: letters read by now
        sizes = [0] * patience.size
        for route, capacity in routes.items():
            source, reader = (hosts[number] for number in route)
            self._slots[route] = sizes[reader]
            sizes[reader] += HEAD + self._room(capacity)
            self._reads[route] = sizes[source]
            sizes[source] += LINE + self._stretch(capacity)
        self._window = window(sizes[patience.rank])
        self._sent = dict.fromkeys((r for r in routes if hosts[r[0]] == patience.rank), 0)
        self._came = dict.fromkeys((r for r in routes if hosts[r[1]] == patience.rank), 0)
        memory = self._window.memory
        self._read = {r: memory[self._reads[r] :][:8].view(np.float64) for r in self._sent}
        self._heads = {r: memory[self._slots[r] :][:HEAD].view(np.float64) for r in self._came}
        self._outbox: deque[Posted] = deque()
        self._coming: list[Letter] = []
        self._open: set[Route] = set()  # whose values are still read

    def post(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Put a letter where its reader finds it; what was read of that one is free by now.

        Raises:
            LabkitError: the values are longer than those of this route may be.
        """
        self._fit(route, values.nbytes)
        self.free((route[1], route[0]))
        self._outbox.append((route, words, values))
        self._deliver()

    def free(self, route: Route) -> None:
        """What came by this route is read no longer."""
        if route in self._open:
            self._open.remove(route)
            read = np.array([float(self._came[route])])
            self._window.write(read, self._hosts[route[0]], self._reads[route])

    def collect(self) -> list[Letter]:
        """Letters that have come since this was asked last."""
        self._window.progress()
        self._deliver()
        for route, head in self._heads.items():
            if head[0] > self._came[route]:
                self._window.sync()  # what was put before the number
                self._came[route] += 1
                if (letter := self._taken(route)) is not None:
                    self._coming.append(letter)
        if not self._coming:
            return []
        now = self._patience.clock.now()
        letters = [letter for letter in self._coming if letter.is_here(now)]
        self._coming = [letter for letter in self._coming if letter not in letters]
        for letter in letters:
            self._open.add(letter.route)
            if not (self.stay and letter.values.nbytes):
                self.free(letter.route)
        return letters

    @property
    def idle(self) -> bool:
        """Whether nothing waits for its reader's slot."""
        self._window.progress()
        self._deliver()
        return not self._outbox

    @property
    def memory(self) -> NDArray[np.uint8]:
        """This rank's, in which others write, or from which they read."""
        return self._window.memory

    def close(self) -> None:
        """Free the memory, when all have come to this (collective)."""
        self._patience.meet("the end of one-sided messages")
        self._read, self._heads = {}, {}
        self._window.close()

    # --- what is placed where; `Parcels` differs in this alone ---------------------------------

    def _room(self, capacity: int) -> int:
        """Bytes beside the head in the memory of who reads."""
        return lines(capacity)

    def _stretch(self, capacity: int) -> int:
        """Bytes beside the count of letters read in the memory of who sends."""
        return 0

    def _fit(self, route: Route, nbytes: int) -> None:
        if nbytes > self._capacities[route]:
            raise LabkitError(
                f"{nbytes} bytes for a slot of {self._capacities[route]}; use "
                "transport='two_sided' or 'one_sided_dynamic', whose messages may have any length"
            )

    def _taken(self, route: Route) -> Letter | None:
        """The letter that lies in a slot; None: the rest of it is still to come."""
        head = self._heads[route][1:]
        values = self._window.memory[self._slots[route] + HEAD :][: int(head[0])]
        return opened(head, values, self._emulation, self._hosts[route[0]])

    def _put(self, route: Route, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        """Put a letter into its empty slot; whether that is all of it."""
        at, to, ticket = self._slots[route], self._hosts[route[1]], 0.0
        if self._emulation:
            ticket = self._emulation.depart(to, values.nbytes)
        if values.nbytes:
            self._window.write(values, to, at + HEAD)
        self._tell(route, headed(route, ticket, words, values))
        self._count(route, values.nbytes)
        return True

    def _tell(self, route: Route, head: NDArray[np.float64]) -> None:
        at, to = self._slots[route], self._hosts[route[1]]
        self._sent[route] += 1
        self._window.write(head, to, at + 8)
        # Last: who sees the number finds the rest.
        self._window.write(np.array([float(self._sent[route])]), to, at)

    def _count(self, route: Route, nbytes: int) -> None:
        self._patience.traffic.payload_bytes += nbytes
        self._patience.count_to(self._hosts[route[1]], nbytes)

    def _deliver(self) -> None:
        """Put what waits into slots that are empty; letters of one route keep their order."""
        waiting: deque[Posted] = deque()
        behind: set[Route] = set()
        for posted in self._outbox:
            route = posted[0]
            if (
                route in behind
                or self._read[route][0] < self._sent[route]
                or not self._put(*posted)
            ):
                behind.add(route)
                waiting.append(posted)
        self._outbox = waiting


def lines(nbytes: int) -> int:
    """So many bytes, up to the end of their last cache line."""
    return -(-nbytes // LINE) * LINE
