"""The clock of a rank: the only place where its code reads time, or lets time pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

ROUNDS = 5  # of an offset's measurement
SPIN = 150e-6  # seconds; below this a sleep is less exact than a loop


class Clock(Protocol):
    """Seconds since some moment that is the same for all ranks of a host; they only grow."""

    def now(self) -> float:
        """The time."""

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        """Let time pass up to a moment, if it is still to come.

        Args:
            moment: when to wake.
            exact: take the core for the last bit, for which a sleep is too coarse.
        """


class WallClock:
    """The host's monotonic clock, exact to some ten microseconds."""

    # The functions themselves: the timeline asks for the time at every event of a step.
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def sleep_until(self, moment: float, exact: bool = True) -> None:
        """See `Clock`."""
        while (left := moment - self.now()) > 0:
            if not exact:
                self.sleep(left)
            elif left > SPIN:
                self.sleep(left - SPIN)
            else:
                os.sched_yield()


WALL = WallClock()


class Offset(NamedTuple):
    """How far a rank's clock was ahead of rank 0's at a moment of its own, all in s.

    The truth lies between `seconds - within` and `seconds + within`.
    """

    moment: float
    seconds: float
    within: float


def offset(clock: Clock, allgather: Callable[[Any], list[Any]]) -> Offset:
    """Measure this rank's clock against that of rank 0 (collective).

    Nobody leaves an allgather before everybody has entered it. So what a rank reads when it leaves
    is later than what the other has read when it entered, and each round bounds the offset from
    both sides; the quickest round bounds it most.
    """
    spans = []
    for _ in range(ROUNDS):
        entered = clock.now()
        allgather(None)
        spans.append((entered, clock.now()))
    first = allgather(spans)[0]
    least = max(entered - left for (entered, _), (_, left) in zip(spans, first, strict=True))
    most = min(left - entered for (_, left), (entered, _) in zip(spans, first, strict=True))
    return Offset(spans[-1][1], (least + most) / 2, (most - least) / 2)
