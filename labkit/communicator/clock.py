"""The clock of a rank; no other module reads the time or sleeps by itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

ROUNDS = 5  # number of allgathers per measurement of a clock offset
SPIN = 150e-6  # seconds; for shorter waits, a spin loop is more exact than a sleep


class Clock(Protocol):
    """A monotonic clock in seconds, whose zero is the same for all ranks of a host."""

    def now(self) -> float:
        """Return the current time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds."""

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        """Sleep until a time of this clock; return at once if that time has passed.

        Args:
            moment: The wake-up time on this clock, in seconds.
            exact: Whether to replace the last part of the sleep by a spin loop, because sleeps end
                too late.
        """


class WallClock:
    """The host's monotonic clock, whose sleeps are exact to some ten microseconds."""

    # The attributes are the functions of `time` themselves, because the timeline calls them at
    # every event and must be fast.
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        """Sleep until a time of this clock, see `Clock.sleep_until`."""
        while (remaining := moment - self.now()) > 0:
            if not exact:
                self.sleep(remaining)
            elif remaining > SPIN:
                self.sleep(remaining - SPIN)
            else:
                os.sched_yield()


WALL = WallClock()


class Offset(NamedTuple):
    """The measured lead of a rank's clock over the clock of rank 0.

    The true lead lies between `seconds - within` and `seconds + within`.

    Attributes:
        moment: The time of the measurement on this rank's clock, in s.
        seconds: The estimated lead of this rank's clock, in s.
        within: The largest possible error of `seconds`, in s.
    """

    moment: float
    seconds: float
    within: float


def offset(clock: Clock, allgather: Callable[[Any], list[Any]]) -> Offset:
    """Measure the offset of this rank's clock from the clock of rank 0 (collective).

    No rank leaves an allgather before all ranks have entered it. A rank's exit time is therefore
    later than the entry time of rank 0, and vice versa. Each allgather thus gives a lower and an
    upper bound of the offset, and the fastest allgather gives the tightest bounds.
    """
    spans = []
    for _ in range(ROUNDS):
        start = clock.now()
        allgather(None)
        spans.append((start, clock.now()))
    first = allgather(spans)[0]
    lower = max(start - end for (start, _), (_, end) in zip(spans, first, strict=True))
    upper = min(end - start for (_, end), (start, _) in zip(spans, first, strict=True))
    return Offset(spans[-1][1], (lower + upper) / 2, (upper - lower) / 2)
