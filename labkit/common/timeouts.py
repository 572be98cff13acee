"""The deadlines of a collective call, which are all computed from one timeout."""

from __future__ import annotations

from typing import NamedTuple

# The grace period after a timeout is at most 30 s (GRACE). A grace period of 30 s is enough on a
# loaded machine.
GRACE = 30.0
# The grace period after a timeout is at least 5 s (LEAST). A process needs time to exit after a
# timeout.
LEAST = 5.0


class Limits(NamedTuple):
    """Deadlines of a rank's wait, in ascending order, in seconds since the beginning of the wait.

        deadlock   min(2, L/4)           ranks of one host that wait in different calls raise
        silent     min(8, L/2)           a host that sends no heartbeat counts as failed
        apart      min(10, 5/8 L)        ranks of several hosts that wait in different calls raise
        look       L - min(3, L/4)       the waiting rank asks for the status of the other ranks
        wait       L                     the waiting rank raises WaitTooLong
        end        L + grace             engines whose rank has not returned are restarted
        rebuilt    L + 2 grace           the remaining engines have handed over their variables

    In the list of deadlines of `Limits`, L is the timeout of a rank's wait, in seconds. The grace
    period is a quarter of the timeout L. The grace period is at least 5 s and at most 30 s. Code
    that waits for a rank in another process uses the deadlines in `Limits`. Code with shorter
    deadlines would stop waiting before the rank itself raises an error.
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
        """Return the deadlines that follow from a timeout of `limit` seconds."""
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
        """Time limit in seconds for the other ranks to return after one rank has failed."""
        return self.end - self.wait
