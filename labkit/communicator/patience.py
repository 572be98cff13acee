"""How a rank waits: never silently, and without taking the core of who computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.communicator.board import Board, Mismatch, WaitTooLong
from labkit.communicator.clock import Clock
from labkit.communicator.traffic import Traffic

if TYPE_CHECKING:
    from mpi4py import MPI

DEADLOCK = 2.0  # seconds in which ranks that wait in different calls cannot both be only late
NAP, LONGEST_NAP = 20e-6, 1e-3  # seconds
SHARE = 0.01  # of what has been waited: a nap of a long wait
LATE = 300e-6  # seconds by which a sleep may last too long
SPINS = 250  # polls before the first nap; about 0.3 ms
_CHECK_EVERY = 16  # polls between two looks at the board and the clock


class Patience:
    """Waits of one rank, each in a call that has a name; what makes waiting pointless is raised.

    Args:
        board: where ranks of this host tell each other how they are.
        traffic: the meter of seconds waited.
        clock: by which it waits.
        rank: this rank.
        limit: seconds after which a wait raises `WaitTooLong`.
        alone: whether the board tells of all ranks, so that a deadlock can be seen on it.
        outer: of the ranks of which these are a part; a failure may be told to them alone.

    Attributes:
        trouble: the first error that a wait has raised.
        polite: sleep between polls instead of spinning.
    """

    def __init__(
        self,
        board: Board,
        traffic: Traffic,
        clock: Clock,
        rank: int,
        limit: float,
        alone: bool,
        outer: Patience | None = None,
    ) -> None:
        self.board, self.traffic, self.rank, self.limit = board, traffic, rank, limit
        self._clock, self._outer = clock, outer
        self.trouble: LabkitError | None = None
        self.polite = False
        self.place = ""
        self._sees_all, self._collective, self._since = alone, False, 0.0

    def enter(self, place: str, collective: bool = True) -> None:
        """Name the call whose waits come next; collective: it waits for all others."""
        self.place, self._collective = place, collective

    def begin(self) -> float:
        """A wait begins now; the time."""
        self.board.enter(self.place, waiting=self._collective)
        self._since = self._clock.now()
        return self._since

    def complete(self, requests: list[MPI.Request]) -> None:
        """Wait for MPI requests, looking around now and then."""
        from mpi4py import MPI

        start = self.begin()
        polls = 0
        while not MPI.Request.Testall(requests):
            self.pause(polls)
            polls += 1
        self.traffic.wait_seconds += self._clock.now() - start

    def sleep_until(self, moment: float) -> None:
        """Sleep until a moment of the clock: a message is on its way, nobody is late."""
        self._clock.sleep(max(0.0, moment - self._clock.now() - LATE))
        self._clock.sleep_until(moment, exact=not self.polite)  # which may have changed meanwhile

    def pause(self, polls: int) -> None:
        """Between two polls: let others have the core, and look around now and then.

        A short wait is a loop. A longer one naps: a loop would slow down the rank that it waits
        for, where two cores are threads of one. The longer the wait, the longer the nap, so that
        many ranks that wait for one leave it a core; it is 1 % of the wait, or the shortest one.
        """
        if polls < SPINS and not self.polite:
            os.sched_yield()
            return
        waited = self._clock.now() - self._since
        self._clock.sleep(min(max(NAP, SHARE * waited), LONGEST_NAP))
        if polls % _CHECK_EVERY == 0:
            self.look_around()

    def look_around(self) -> None:
        """Raise if waiting has become pointless, and remember why.

        Raises:
            RankFailed, Mismatch, WaitTooLong: see `Communicator`.
        """
        waited = self._clock.now() - self._since
        try:
            for each in self._whole():
                each.board.check()
            if waited > DEADLOCK and self._sees_all and self._collective:
                calls = self.board.deadlock(DEADLOCK)
                if calls:
                    raise Mismatch(f"ranks wait for each other in different calls: {calls}")
            if waited > self.limit:
                raise WaitTooLong(
                    f"rank {self.rank} has waited {waited:.0f} s in {self.place}: "
                    f"{self.board.elsewhere(self.place)}; "
                    f"a longer wait is allowed by limit={2 * self.limit:.0f}"
                )
        except LabkitError as error:
            for each in self._whole():
                each.trouble = error
            raise

    def _whole(self) -> Iterator[Patience]:
        """This one, and those of the ranks around it."""
        at: Patience | None = self
        while at is not None:
            yield at
            at = at._outer
