"""A board on which each rank writes where it is, so that a wait can name names."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.common.errors import LabkitError
from labkit.communicator.clock import Clock
from labkit.communicator.relay import Relay
from labkit.communicator.sheet import PLACE, Host, Sheet

if TYPE_CHECKING:
    from mpi4py import MPI

DEADLOCK = 2.0  # seconds in which ranks that wait in different calls cannot both be only late
# The same over hosts, where data may be on their way for long: over a link that was down for 5 s,
# or a slow one.
APART = 10.0
LEAVE = 2  # seconds that MPI's end may take where a host or a rank is gone


class RankFailed(LabkitError):
    """Another rank has failed, so this one cannot go on.

    Attributes:
        rank: the rank that failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankDied(RankFailed):
    """The process of a rank is gone; the others may go on, see `Communicator.shrink`.

    Attributes:
        ranks: who is gone, as far as this rank knows.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        who = ", ".join(map(str, ranks))
        told = f"rank {who} died: its process is gone" if who else "a rank died"
        super().__init__(told, ranks[0] if ranks else -1)
        self.ranks = tuple(ranks)


class HostSilent(RankFailed):
    """A host has not been heard for some seconds: it, or the link to it, is gone."""


class WaitTooLong(LabkitError):
    """A wait outlasted its limit; the message names who waits for whom, in what."""


class Mismatch(LabkitError):
    """Ranks called the same collective with different arguments; the message names them."""


class Board:
    """One row a rank: the call it is in, since when, and why it failed, if it has.

    Rows are plain bytes in a table that the ranks of a host share: a write costs about a
    microsecond and a reader needs no help from the rank it reads about, which may be stuck in
    a computation. Between hosts a thread of the first rank of each carries them, see `Relay`: they
    are some tenths of a second old there.
    """

    def __init__(self, comm: MPI.Intracomm, clock: Clock) -> None:
        from mpi4py import MPI

        self._clock, self._rank = clock, comm.rank
        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        assert isinstance(self._host, MPI.Intracomm)  # as all parts of one are
        self.local_rank: int = self._host.rank
        self.ranks: list[int] = self._host.allgather(comm.rank)  # of this host
        own = Host(tuple(self.ranks), MPI.Get_processor_name())
        hosts = [own] if self._host.size == comm.size else sorted(set(comm.allgather(own)))
        first = self.local_rank == 0
        nbytes = Sheet.nbytes(hosts) if first else 0
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=self._host)
        self._sheet = Sheet(self._window.Shared_query(0)[0], hosts, hosts.index(own))
        self._own = self._sheet.rows[comm.rank : comm.rank + 1]
        if first:
            self._sheet.clear(clock.now())
        self._host.Barrier()
        self.deadlocked_after = DEADLOCK if len(hosts) == 1 else APART
        self._relay: Relay | None = None
        if len(hosts) > 1:
            self._firsts = comm.Split(0 if first else MPI.UNDEFINED, comm.rank)
            if isinstance(self._firsts, MPI.Intracomm) and first:
                self._relay = Relay(self._firsts, self._sheet, clock)
                # Where nobody closes the board, after a failure, other hosts are told at its end.
                self._end = weakref.finalize(self, self._relay.close, patient=False)

    def enter(self, place: str, waiting: bool = False) -> None:
        """Say which call this rank is in now, and whether it waits there for all others."""
        self._own["waiting"] = 0  # while the row changes
        self._own["since"] = self._clock.now()
        self._own["place"] = place.encode()[:PLACE]
        self._own["waiting"] = waiting

    def fail(self, cause: str) -> None:
        """Say that this rank has failed; ranks that wait will raise `RankFailed`."""
        self._sheet.fail(self._rank, cause)
        if self._relay is not None:
            self._relay.wake()

    def check(self) -> None:
        """Raise `RankFailed` when another rank has failed, naming the first cause.

        Raises:
            HostSilent: another host has not been heard for some seconds.
        """
        silent = self._sheet.silent()
        if silent is not None:
            atexit.register(leave_without_it)
        failed = self._failed()
        if failed:
            # Who failed because of another may have been read first: its cause is there by now.
            told = self._failed()
            rank, cause = min(told, key=lambda pair: pair[1].startswith("RankFailed"))
            raise RankFailed(f"rank {rank} failed: {cause}", rank)
        if silent is not None:
            (ranks, name), seconds = silent
            raise HostSilent(
                f"host {name} with rank {', '.join(map(str, ranks))} has not been heard for "
                f"{seconds:.0f} s: the link to it, or the host, is gone",
                ranks[0],
            )

    def _failed(self) -> list[tuple[int, str]]:
        rows = self._sheet.rows
        return [
            (rank, rows["cause"][rank].decode(errors="replace"))
            for rank in rows["failed"].nonzero()[0].tolist()
            if rank != self._rank
        ]

    def deadlock(self) -> dict[int, str]:
        """The call of each rank, if each waits for all others in one, and not all in the same.

        They must have waited for `deadlocked_after` seconds when they were last heard.
        """
        rows = self._sheet.rows
        latest = min(self._clock.now(), self._sheet.heard.min()) - self.deadlocked_after
        if not (rows["waiting"].all() and (rows["since"] < latest).all()):
            return {}
        places = self._places()
        return places if len(set(places.values())) > 1 else {}

    def stop_after(self, step: int) -> None:
        """Ask all ranks to stop when they have done this step."""
        self._own["stop"] = step
        self._be_seen()

    def asked_to_stop(self, step: int) -> bool:
        """Whether rank 0 wants training to end with this step or an earlier one."""
        return bool(self._sheet.rows["stop"][0] <= step)

    def end_after(self, step: int) -> None:
        """Say that training has come to its end for this rank: all go on to this step only."""
        self._own["last"] = step
        self._be_seen()

    def ends_with(self, step: int) -> bool:
        """Whether a rank has said so of this step or an earlier one."""
        return bool((self._sheet.rows["last"] <= step).any())

    def _be_seen(self) -> None:
        """Go on when all hosts know what this rank has written: it may now enter what others leave.

        Raises:
            RankFailed: one of them never will.
        """
        self._own["mark"] += 1
        if self._relay is not None:
            self._relay.wake()
        while not self._sheet.everywhere(self._rank):
            self.check()
            self._clock.sleep(1e-3)

    def _places(self) -> dict[int, str]:
        places = self._sheet.rows["place"].tolist()
        return {rank: place.decode(errors="replace") for rank, place in enumerate(places)}

    def elsewhere(self, place: str) -> str:
        """The ranks that are not in `place`, each with the call it is in and for how long."""
        now = self._clock.now()
        found = [
            f"rank {rank} is in {there} for {now - self._sheet.rows['since'][rank]:.0f} s"
            for rank, there in self._places().items()
            if there != place
        ]
        return "; ".join(found) or "every rank is in this call"

    def abandon(self) -> None:
        """Leave the window as it is: a rank is gone, without whom it cannot be freed."""
        if self._relay is not None:
            self._end.detach()
            self._relay.abandon()

    def close(self) -> None:
        """Free the window (collective)."""
        if self._relay is not None:
            self._end.detach()
            if self._relay.close(patient=True):  # else MPI still has a bulletin to deliver there
                self._firsts.Free()
        del self._own, self._sheet
        self._window.Free()
        self._host.Free()


def leave_without_it() -> None:
    """MPI's end may wait for those that are gone, for ever: this process then ends by a signal."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE)
