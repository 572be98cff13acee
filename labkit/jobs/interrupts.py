"""Ctrl-C and SIGTERM, counted: none may fall between a start and its record."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

from labkit.records.endings import Terminated, by_whom

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """While it is entered, the signals that ask for an end are counted instead of raised.

    Args:
        first: called with the first one.

    Attributes:
        count: how many have come.
        why: the words for a record: by whom the last one was.
    """

    def __init__(self, first: Callable[[], object]) -> None:
        self.count, self.why, self._first = 0, "", first

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._one_more) for number in NUMBERS]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in zip(NUMBERS, self._before, strict=True):
            signal.signal(number, handler)

    def _one_more(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        error = KeyboardInterrupt() if number == signal.SIGINT else Terminated("SIGTERM")
        self.why = by_whom(error)
        if self.count == 1:
            self._first()
