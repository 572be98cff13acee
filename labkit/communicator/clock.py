"""The clock of a rank, which all other modules use to read the time and to sleep."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

ROUNDS = 5  # labkit measures a clock offset with five allgathers (ROUNDS).
SPIN = 150e-6  # For waits shorter than 150 µs (SPIN), a spin loop is more exact than a sleep.


class Clock(Protocol):
    """A monotonic clock in seconds; its zero point is the same for all ranks of a host."""

    def now(self) -> float:
        """Return the current time in seconds."""

    def sleep(self, seconds: float) -> None:
        """Sleep for a number of seconds."""

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        """Sleep until a time of this clock; return at once if the time has already passed.

        Args:
            moment: The wake-up time on this clock, in seconds.
            exact: Whether a spin loop replaces the last part of the sleep. Operating systems wake a
                sleeping process too late.
        """


class WallClock:
    """The monotonic clock of the host, whose sleeps are exact to a few tens of microseconds."""

    # `now` and `sleep` are functions of the module `time` without a wrapper. labkit calls the
    # clock's `now` and `sleep` at every event of the timeline.
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
    """The time by which a rank's clock is ahead of rank 0's clock, with the error bound.

    The true lead of the clock is between `seconds - within` and `seconds + within`.

    Attributes:
        moment: The time at which the lead was measured, on this rank's clock, in seconds.
        seconds: The estimated lead of this rank's clock over the clock of rank 0, in seconds.
        within: The maximum error of `seconds`, in seconds.
    """

    moment: float
    seconds: float
    within: float


def offset(clock: Clock, allgather: Callable[[Any], list[Any]]) -> Offset:
    """Measure the offset of this rank's clock from the clock of rank 0 (collective).

    No rank can leave an allgather before all ranks have entered the allgather. Each rank leaves the
    allgather only after rank 0 has entered. Rank 0 leaves the allgather only after each rank has
    entered. Each allgather gives a lower and an upper bound of the clock offset. The fastest
    allgather gives the tightest bounds of the clock offset.
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
