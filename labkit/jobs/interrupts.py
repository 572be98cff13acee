"""Signal handlers that count SIGINT and SIGTERM, so that no signal prevents a process's record."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from labkit.records.endings import Terminated, interruption_text

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context that counts SIGINT and SIGTERM instead of raising exceptions.

    Args:
        first: Function that is called when the first signal arrives.

    Attributes:
        count: Number of signals received so far.
        why: Cause of the interruption, derived from the last signal, as text for a record. `why` is
            "" before a signal arrives.
    """

    def __init__(self, first: Callable[[], object]) -> None:
        self.count, self.why, self._first = 0, "", first

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._count_signal) for number in NUMBERS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in zip(NUMBERS, self._before, strict=True):
            signal.signal(number, handler)

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        error = KeyboardInterrupt() if number == signal.SIGINT else Terminated("SIGTERM")
        self.why = interruption_text(error)
        if self.count == 1:
            self._first()
