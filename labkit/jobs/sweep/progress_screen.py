"""A sweep's progress display: one line per ended notebook run, and a status line in a terminal."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self, TextIO

from labkit.common.terminal import plain, status_line
from labkit.common.units import duration_text
from labkit.jobs.sweep.sweep_plan import SweepMember
from labkit.records.endings import Terminated, interruption_text

LINE_EVERY = 0.5  # seconds between two updates of the status line


class SweepScreen:
    """A display of a sweep's ended and running notebook runs, and the estimated remaining time.

    Args:
        total: Number of notebook runs of the sweep.
        done: Number of notebook runs that earlier commands completed.
        stream: Output stream; default: standard error.
    """

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self.total, self.states = total, Counter({"completed": done})
        self._stream = stream or sys.stderr
        self._spent: list[float] = []
        self._line = self._stream.isatty()
        self._shown_at = 0.0

    def ended(
        self, member: SweepMember, state: str, cause: str | None, spent: float, remaining: str
    ) -> None:
        """Print that a notebook run has ended, with its state, duration and cause."""
        self.states[state] += 1
        self._spent.append(spent)
        number = sum(self.states.values())
        reason = f": {cause}" if cause else ""
        # In a terminal, the status line shows the remaining time. The line about an ended notebook
        # run therefore omits the remaining time.
        ending = "" if self._line or not remaining else f"; {remaining}"
        self._clear()
        width = len(str(self.total))
        print(
            plain(
                f"[{number:{width}}/{self.total}] {member.folder}  {state} in "
                f"{duration_text(spent)}{reason}{ending}"
            ),
            file=self._stream,
            flush=True,
        )

    def tick(self, running: dict[str, float], remaining: str) -> None:
        """Show the notebook runs in progress and their durations in a terminal's status line."""
        if not self._line or time.monotonic() - self._shown_at < LINE_EVERY:
            return
        self._shown_at = time.monotonic()
        names = ", ".join(f"{name} ({duration_text(spent)})" for name, spent in running.items())
        parts = [f"{self.states['completed']} of {self.total} completed"]
        parts += [f"{self.states['failed']} failed"] if self.states["failed"] else []
        parts += [remaining] if remaining else []
        parts += [f"running: {names}"] if names else []
        self._clear()
        print(status_line(" · ".join(parts)), end="", file=self._stream, flush=True)

    def remaining_time(self, waiting: int, running: dict[str, float], abreast: int) -> str:
        """Estimate a sweep's remaining time from the mean duration of ended notebook runs.

        Args:
            waiting: Number of notebook runs that have not started.
            running: Seconds since the start of each notebook run in progress, by job folder.
            abreast: Number of notebook runs that are in progress at the same time.

        Returns: The remaining time as a text, such as "about 5 min left". The text is empty if no
            notebook run has ended or if none remains.
        """
        if not self._spent or not (waiting or running):
            return ""
        typical = sum(self._spent) / len(self._spent)
        # A notebook run that already exceeds the mean duration adds nothing to the estimate of the
        # remaining time.
        rest = typical * waiting + sum(max(typical - seconds, 0) for seconds in running.values())
        return f"about {duration_text(max(rest / abreast, 1))} left"

    def say(self, text: str) -> None:
        """Print a message on a separate line."""
        self._clear()
        print(plain(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the status line."""
        self._clear()

    def _clear(self) -> None:
        if self._line:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)


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
