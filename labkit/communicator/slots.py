"""Letters that are written straight into the memory of who reads them: one-sided."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from labkit.communicator.mailbox import WORDS, Letter
from labkit.communicator.window import Window

_HEAD = 128  # bytes: whether the slot is full, bytes of values, the caller's words; aligned


class Slots:
    """A mailbox of one slot for each pair of ranks: who sends puts, who reads takes no part.

    Memory is placed once, at the begin, and values are read where they were put: they stay until
    their reader posts a letter back to who sent them, or frees them. A letter for a slot that is
    still full waits at its sender. So there is no handshake, no copy on the reader's side, and
    nothing to allocate.

    Args:
        window: memory of this rank, of `Slots.nbytes` bytes.
        rank, size: this rank's number, and how many there are.
        capacity: bytes of the longest values.

    Source: J. Xue, Y. Miao, C. Chen, M. Wu, L. Zhang, L. Zhou: Fast distributed deep learning over
    RDMA, EuroSys 2019: tensors placed statically at their receivers, which poll a flag.
    """

    def __init__(self, window: Window, rank: int, size: int, capacity: int) -> None:
        self._window, self._rank = window, rank
        self._stride = self._of_one(capacity)
        self._outbox: deque[tuple[int, NDArray[np.float64], NDArray[np.uint8]]] = deque()
        self._open: set[int] = set()  # sources whose values are still read
        self._heads = [
            window.memory[at : at + _HEAD].view(np.float64)
            for at in range(0, size * self._stride, self._stride)
        ]

    @classmethod
    def nbytes(cls, size: int, capacity: int) -> int:
        """What a rank's memory must hold."""
        return size * cls._of_one(capacity)

    @staticmethod
    def _of_one(capacity: int) -> int:
        return _HEAD + -(-capacity // 64) * 64

    def post(self, to: int, words: NDArray[np.float64], values: NDArray[np.uint8]) -> None:
        """Put a letter where its reader finds it; what was read of that one is free by now."""
        self.free(to)
        self._outbox.append((to, words, values))
        self._deliver()

    def free(self, source: int) -> None:
        """The values that this one has sent are read no longer."""
        if source in self._open:
            self._open.remove(source)
            self._heads[source][0] = 0.0
            self._window.sync()

    def collect(self) -> list[Letter]:
        """Letters that have come since this was asked last."""
        self._deliver()
        self._window.sync()
        return list(self._come())

    def close(self) -> None:
        """Free the memory (collective)."""
        self._heads = []
        self._window.close()

    @property
    def idle(self) -> bool:
        """Whether nothing waits for its reader's slot."""
        self._deliver()
        return not self._outbox

    def _come(self) -> Iterator[Letter]:
        for source, head in enumerate(self._heads):
            if head[0] == 0.0 or source in self._open:
                continue
            at = source * self._stride + _HEAD
            values = self._window.memory[at : at + int(head[1])]
            words = head[2:].copy()
            if values.nbytes:
                self._open.add(source)
            else:
                head[0] = 0.0
            yield Letter(source, words, values)

    def _deliver(self) -> None:
        """Put what waits into slots that are empty; letters for one reader keep their order."""
        waiting: deque[tuple[int, NDArray[np.float64], NDArray[np.uint8]]] = deque()
        behind: set[int] = set()
        while self._outbox:
            to, words, values = self._outbox.popleft()
            if to in behind or not self._put(to, words, values):
                behind.add(to)
                waiting.append((to, words, values))
        self._outbox = waiting

    def _put(self, to: int, words: NDArray[np.float64], values: NDArray[np.uint8]) -> bool:
        at, full = self._rank * self._stride, np.ones(1)
        self._window.get(full, to, at)
        if full[0]:
            return False
        head = np.zeros(1 + WORDS)
        head[0], head[1 : 1 + len(words)] = values.nbytes, words
        if values.nbytes:
            self._window.put(values, to, at + _HEAD)
        self._window.put(head, to, at + 8)
        self._window.put(np.ones(1), to, at)  # last: who sees it finds the rest
        return True
