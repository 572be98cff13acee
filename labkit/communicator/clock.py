"""The clock of a rank: the only place where its code reads time, or lets time pass."""

from __future__ import annotations

import os
import time
from typing import Protocol

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
