"""The deadlines around a call: all follow from one limit, and an inner one fires first."""

from __future__ import annotations

from typing import NamedTuple

GRACE = 30.0  # seconds: load is no hang
LEAST = 5.0  # seconds that a process needs for its end, whatever the limit is


class Limits(NamedTuple):
    """Moments of one wait of a rank, in s since it began, in the order in which they come.

        deadlock   min(2, L/4)           ranks of one host wait in different calls
        silent     min(8, L/2)           another host is not heard any more
        apart      min(10, 5/8 L)        ranks of several hosts wait in different calls
        look       L - min(3, L/4)       who waits asks what the others are doing
        wait       L                     who waits gives up, and says so
        end        L + grace             engines whose rank has not ended start anew
        rebuilt    L + 2 grace           those that answer have handed over their variables

    The grace is a quarter of L, at least 5 s and at most 30 s. Whoever waits for a rank from
    outside waits for these, never for a time of its own that might end before them.
    """

    deadlock: float
    silent: float
    apart: float
    look: float
    wait: float
    end: float
    rebuilt: float

    @classmethod
    def of(cls, limit: float) -> Limits:
        """Those of a limit L, in s."""
        grace = min(GRACE, max(LEAST, limit / 4))
        return cls(
            deadlock=min(2.0, limit / 4),
            silent=min(8.0, limit / 2),
            apart=min(10.0, limit * 5 / 8),
            look=limit - min(3.0, limit / 4),
            wait=limit,
            end=limit + grace,
            rebuilt=limit + 2 * grace,
        )

    @property
    def grace(self) -> float:
        """Seconds that the other ranks get to end after one has failed."""
        return self.end - self.wait
