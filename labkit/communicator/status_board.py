"""A board on which each rank writes where it is, so that a wait can name names."""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator.clock import Clock
from labkit.communicator.status_relay import Relay
from labkit.communicator.status_table import ENDED, PEERS, PLACE, HostRanks, StatusTable

if TYPE_CHECKING:
    from mpi4py import MPI

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
    """The process of a rank has ended; the others may go on, see `Communicator.shrink`.

    Attributes:
        ranks: who is gone, as far as this rank knows; by their numbers before anybody was.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        who = ", ".join(map(str, ranks))
        super().__init__(f"rank {who or '?'} failed: {ENDED}", ranks[0] if ranks else -1)
        self.ranks = tuple(ranks)


class HostSilent(RankFailed):
    """A host has not been heard for some seconds: it, or the link to it, is gone."""


class WaitTooLong(LabkitError):
    """A wait outlasted its limit; the message names who waits for whom, in what."""


class Mismatch(LabkitError):
    """Ranks called the same collective with different arguments; the message names them."""


class StatusBoard:
    """One row a rank: the call it is in, since when, and why it failed, if it has.

    Rows are plain bytes in a table that the ranks of a host share: a write costs about a
    microsecond and a reader needs no help from the rank it reads about, which may be stuck in
    a computation. Between hosts a thread of the first rank of each carries them, see `Relay`: they
    are some tenths of a second old there.

    Args:
        comm: the ranks.
        clock: of this host.
        limits: after which a wait is pointless.
        numbers: of the ranks before any was gone, by which those that are gone are named.
    """

    def __init__(
        self, comm: MPI.Intracomm, clock: Clock, limits: Limits, numbers: Sequence[int]
    ) -> None:
        from mpi4py import MPI

        from labkit.communicator.process_inspector import answer

        self._clock, self._rank = clock, comm.rank
        self.limits, self._numbers = limits, numbers
        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        assert isinstance(self._host, MPI.Intracomm)  # as all parts of one are
        self.local_rank: int = self._host.rank
        self.ranks: list[int] = self._host.allgather(comm.rank)  # of this host
        host_ranks = HostRanks(tuple(self.ranks), MPI.Get_processor_name())
        hosts = (
            [host_ranks]
            if self._host.size == comm.size
            else sorted(set(comm.allgather(host_ranks)))
        )
        first = self.local_rank == 0
        nbytes = StatusTable.nbytes(hosts) if first else 0
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=self._host)
        self._sheet = StatusTable(self._window.Shared_query(0)[0], hosts, hosts.index(host_ranks))
        self._own = self._sheet.rows[comm.rank : comm.rank + 1]
        if first:
            self._sheet.clear(clock.now())
        self._host.Barrier()
        answer()
        self._own["pid"] = os.getpid()
        # Over hosts data may be on their way for long: over a link that was down, or a slow one.
        self.deadlocked_after = limits.deadlock if len(hosts) == 1 else limits.apart
        self._relay: Relay | None = None
        if len(hosts) > 1:
            self._between = comm.Dup()
            self._relay = Relay(self._between, self._sheet, clock)
            # Where nobody closes the board, after a failure, other hosts are told at its end.
            self._end = weakref.finalize(self, self._relay.close, patient=False)

    def enter(self, place: str, waiting: bool = False, number: int = 0) -> None:
        """Say which call this rank is in now, and whether it waits there for all others.

        Args:
            number: of the round of a schedule, from 1; 0: it has none.
        """
        self._own["waiting"] = 0  # while the row changes
        self._own["since"] = self._clock.now()
        self._own["place"] = place.encode()[:PLACE]
        self._own["round"] = number
        self._own["waiting"] = waiting

    def fail(self, cause: str) -> None:
        """Say that this rank has failed; ranks that wait will raise `RankFailed`."""
        self._sheet.fail(self._rank, cause)
        if self._relay is not None:
            self._relay.wake()

    def mark_dead(self, dead: Sequence[int]) -> RankDied:
        """Write down of ranks that MPI has found dead that they have failed; what to raise."""
        for rank in dead:
            self._sheet.die(rank)
        return RankDied([self._numbers[rank] for rank in dead])

    def check(self) -> None:
        """Raise `RankFailed` when another rank has failed, naming the first cause.

        Raises:
            HostSilent: another host has not been heard for some seconds.
        """
        silent = self._sheet.silent(self.limits.silent)
        if silent is not None:
            atexit.register(leave_without_it)
        failed = self._failed()
        if failed:
            # Who failed because of another may have been read first: its cause is there by now.
            told = self._failed()
            rank, cause = min(told, key=lambda pair: pair[1].startswith("RankFailed"))
            if cause == ENDED:
                raise RankDied([self._numbers[rank]])
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

    def request_checkpoint(self, step: int) -> None:
        """Ask all ranks to keep their state when they have done this step."""
        self._own["keep"] = step
        self._be_seen()

    def asked_to_keep(self, step: int) -> bool:
        """Whether rank 0 wants the state after this very step to be kept."""
        return bool(self._sheet.rows["keep"][0] == step)

    def count(self, *numbers: int) -> None:
        """Tell others how far this rank is: `COUNTS` numbers, whatever they mean."""
        self._own["counts"] = numbers

    def set_quiescent(self, time: int) -> None:
        """Say that the counts of this rank stay, at a standstill by its number; 0: they move."""
        self._own["stands"] = time

    def counts(self) -> np.ndarray:
        """Of all ranks, (size, COUNTS); those of other hosts some tenths of a second old."""
        found: np.ndarray = self._sheet.rows["counts"]
        return found

    def all_stand_still(self, time: int) -> bool:
        """Whether all ranks have said so; counts that are read after it are theirs."""
        return bool((self._sheet.rows["stands"] == time).all())

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

    def ask(self) -> None:
        """Have it written down what all ranks are doing; of other hosts it comes in a second."""
        self._own["asks"] += 1
        if self._relay is not None:
            self._relay.wake()
        self._sheet.look(self._clock)

    def everyone(self, place: str) -> str:
        """Each rank with its call, for how long it has been there, and what it was seen doing.

        First those that are not in `place`, who keep the others waiting.
        """
        now, rows = self._clock.now(), self._sheet.rows
        told: tuple[list[str], list[str]] = [], []
        for rank, there in self._places().items():
            which = f", round {rows['round'][rank]}" if rows["round"][rank] else ""
            seen = rows["look"][rank].decode(errors="replace")
            where = "waits there too" if there == place else f"is in {there}"
            words = f"rank {rank} {where}{which} for {now - rows['since'][rank]:.0f} s"
            told[there == place].append(f"{words} ({seen})" if seen else words)
        return "; ".join(told[0] + told[1])

    def tally(self, kind: str, peer: int) -> None:
        """Count a message that was "sent" to a rank, or that this one has "got" from it."""
        if peer < PEERS:
            self._own[kind][0, peer] += 1

    def lost(self) -> str:
        """Who has sent more to whom than has been received, as words; "" where nobody has."""
        rows = self._sheet.rows[:PEERS]
        pairs = np.argwhere(rows["sent"][:, : len(rows)] != rows["got"][:, : len(rows)].T)
        told = ", ".join(f"from rank {source} to rank {to}" for source, to in pairs.tolist())
        return f"; sent and not received: a message {told}" if told else ""

    def abandon(self) -> None:
        """Leave the window as it is: a rank is gone, without whom it cannot be freed."""
        if self._relay is not None:
            self._end.detach()
            self._relay.abandon()

    def close(self) -> None:
        """Free the window (collective)."""
        if self._relay is not None:
            self._end.detach()
            # Else MPI still has a bulletin to deliver there.
            if all(self._host.allgather(self._relay.close(patient=True))):
                self._between.Free()
        del self._own, self._sheet
        self._window.Free()
        self._host.Free()


def leave_without_it() -> None:
    """MPI's end may wait for those that are gone, for ever: this process then ends by a signal."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LEAVE)
