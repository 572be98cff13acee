"""The total number of batches that asynchronous workers compute, each at its own speed."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.common.state import record
from labkit.programs import Message, Roles


@record(
    *("_leads", "_each", "_epoch", "_epochs", "_granted", "_total", "_done", "_at_work"),
    *("_lost", "_kept"),
)
class Quota:
    """A server's count of the batches that workers have completed, or are computing now.

    The first server decides when a worker has no more batches to compute. If a worker fails, other
    workers compute the batches that it had begun.

    Args:
        roles: The roles of all processes.
        number: The number of this server.
        each: The number of batches that a worker computes between two replies of the server.
    """

    def __init__(self, roles: Roles, number: int, each: int = 1) -> None:
        self._leads, self._each = number == roles.lead, each
        self._epoch, self._epochs = roles.steps * roles.workers, roles.epochs
        self._granted, self._total = each * roles.workers, self._epoch * roles.epochs
        self._done = dict.fromkeys(range(roles.workers), 0)
        self._at_work = set(self._done)
        self._lost = self._kept = 0

    def ends(self, push: Message) -> bool:
        """Record a push of gradients; return whether its worker has no more batches to compute."""
        self._done[push.source] = push.step + 1
        if push.ends:
            self._total = self._granted
        ends = self._leads and self._granted >= self._total
        if ends:
            self._at_work.remove(push.source)
        else:
            self._granted += self._each
        return ends

    def leaves(self, goodbye: Message) -> None:
        """Record a worker's last message; other workers get the batches of a failed worker."""
        if goodbye.ends and goodbye.source in self._at_work:
            self._lost += self._each
            self._granted -= self._each

    def epochs(self, last: bool = False) -> Iterator[int]:
        """Yield the number of each epoch that was completed since the last call.

        Args:
            last: Whether all workers have ended. If all workers have ended, batches that failed
                workers had begun count as completed.
        """
        done = sum(self._done.values()) + (self._lost if last else 0)
        while self._kept < self._epochs and done >= (self._kept + 1) * self._epoch:
            yield self._kept
            self._kept += 1
