"""Who goes on where nobody waits: as many batches as the epochs have, whoever computes them."""

from __future__ import annotations

from collections.abc import Iterator

from labkit.common.state import record
from labkit.programs import Message, Roles


@record(
    *("_leads", "_each", "_epoch", "_epochs", "_granted", "_total", "_done", "_at_work"),
    *("_lost", "_kept"),
)
class Quota:
    """What a server knows of the batches that are computed or under way.

    The first server says who is done. What a lost worker had begun is for the others.

    Args:
        roles: who there is.
        number: of the server.
        each: batches that a worker computes from one answer to the next.
    """

    def __init__(self, roles: Roles, number: int, each: int = 1) -> None:
        self._leads, self._each = number == roles.lead, each
        self._epoch, self._epochs = roles.steps * roles.workers, roles.epochs
        self._granted, self._total = each * roles.workers, self._epoch * roles.epochs
        self._done = dict.fromkeys(range(roles.workers), 0)
        self._at_work = set(self._done)
        self._lost = self._kept = 0

    def ends(self, push: Message) -> bool:
        """Whether the answer to a worker is that there is no more to do."""
        self._done[push.source] = push.step + 1
        if push.ends:
            self._total = self._granted
        over = self._leads and self._granted >= self._total
        if over:
            self._at_work.remove(push.source)
        else:
            self._granted += self._each
        return over

    def leaves(self, goodbye: Message) -> None:
        """A worker says nothing more."""
        if goodbye.ends and goodbye.source in self._at_work:
            self._lost += self._each
            self._granted -= self._each

    def epochs(self, last: bool = False) -> Iterator[int]:
        """Epochs that are over by now, each once.

        Args:
            last: nobody is left, who could compute what a worker had begun that was lost.
        """
        done = sum(self._done.values()) + (self._lost if last else 0)
        while self._kept < self._epochs and done >= (self._kept + 1) * self._epoch:
            yield self._kept
            self._kept += 1
