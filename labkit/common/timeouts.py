"""The deadlines of a collective call, all derived from one timeout."""

from __future__ import annotations

from typing import NamedTuple

GRACE = 30.0  # maximum seconds of the grace period; even a loaded machine needs no more
LEAST = 5.0  # minimum seconds of the grace period, because a process needs time to exit


class Limits(NamedTuple):
    """Deadlines of one wait of a rank, in seconds since the wait began, in ascending order.

        deadlock   min(2, L/4)           ranks of one host that wait in different calls raise
        silent     min(8, L/2)           a host that sends no heartbeat counts as failed
        apart      min(10, 5/8 L)        ranks of several hosts that wait in different calls raise
        look       L - min(3, L/4)       the waiting rank asks for the status of the other ranks
        wait       L                     the waiting rank raises WaitTooLong
        end        L + grace             engines whose rank has not returned are restarted
        rebuilt    L + 2 grace           the remaining engines have handed over their variables

    L is the timeout. The grace period is L/4, at least 5 s and at most 30 s. Code that waits for a
    rank in another process uses these deadlines. With shorter deadlines, such code would give up
    before the rank itself does.
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
        """Return the deadlines for a timeout L, in seconds."""
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
        """Seconds that the other ranks get to return after one rank has failed."""
        return self.end - self.wait
