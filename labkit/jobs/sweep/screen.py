"""What a person sees of a sweep: a line that changes in a terminal, a line a member elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from typing import TextIO

from labkit.common.terminal import plain
from labkit.common.units import duration_text
from labkit.jobs.sweep.plan import Member

LINE_EVERY = 0.5  # seconds


class Screen:
    """Members done, running and to come, and how long the rest will take.

    Args:
        total: members of the sweep.
        done: those that completed before.
    """

    def __init__(self, total: int, done: int, stream: TextIO | None = None) -> None:
        self.total, self.states = total, Counter({"completed": done})
        self._stream = stream or sys.stderr
        self._spent: list[float] = []
        self._line = self._stream.isatty()
        self._shown_at = 0.0

    def ended(self, member: Member, state: str, cause: str | None, spent: float, left: str) -> None:
        """A member has ended."""
        self.states[state] += 1
        self._spent.append(spent)
        number = sum(self.states.values())
        reason = f": {cause}" if cause else ""
        # In a terminal the changing line says it already.
        ending = "" if self._line or not left else f"; {left}"
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

    def tick(self, running: dict[str, float], left: str) -> None:
        """In a terminal, show what runs for how long now, at most twice a second."""
        if not self._line or time.monotonic() - self._shown_at < LINE_EVERY:
            return
        self._shown_at = time.monotonic()
        names = ", ".join(f"{name} ({duration_text(spent)})" for name, spent in running.items())
        parts = [f"{self.states['completed']} of {self.total} completed"]
        parts += [f"{self.states['failed']} failed"] if self.states["failed"] else []
        parts += [left] if left else []
        parts += [f"running: {names}"] if names else []
        text = " · ".join(parts)
        # One less: a full line would wrap, and only its last row could be taken away.
        width = shutil.get_terminal_size().columns - 1
        self._clear()
        print(plain(text)[:width], end="", file=self._stream, flush=True)

    def left(self, waiting: int, running: dict[str, float], abreast: int) -> str:
        """How long the rest will take, if it takes as long as what has ended: "" before that."""
        if not self._spent or not (waiting or running):
            return ""
        typical = sum(self._spent) / len(self._spent)
        # One that takes longer than typical counts as about to end, not as a credit.
        rest = typical * waiting + sum(max(typical - spent, 0) for spent in running.values())
        return f"about {duration_text(max(rest / abreast, 1))} left"

    def say(self, text: str) -> None:
        """A line of its own."""
        self._clear()
        print(plain(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Take the changing line away."""
        self._clear()

    def _clear(self) -> None:
        if self._line:
            print("\r\x1b[2K", end="", file=self._stream, flush=True)
