"""A board in shared memory on which each rank writes where it is, so that a wait can name names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.errors import LabkitError
from labkit.communicator.clock import Clock

if TYPE_CHECKING:
    from mpi4py import MPI

PLACE = 120  # bytes for the name of a call
NEVER = np.iinfo(np.int64).max
CAUSE = 360  # bytes for the reason of a failure


class RankFailed(LabkitError):
    """Another rank has failed, so this one cannot go on.

    Attributes:
        rank: the rank that failed.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class WaitTooLong(LabkitError):
    """A wait outlasted its limit; the message names who waits for whom, in what."""


class Mismatch(LabkitError):
    """Ranks called the same collective with different arguments; the message names them."""


class Board:
    """One row a rank: the call it is in, since when, and why it failed, if it has.

    Rows are plain bytes in a window that the ranks of one host share: a write costs about a
    microsecond and a reader needs no help from the rank it reads about, which may be stuck in
    a computation. Ranks on other hosts are not seen; about them only the limit speaks.
    """

    def __init__(self, comm: MPI.Intracomm, clock: Clock) -> None:
        from mpi4py import MPI

        self._clock = clock
        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        assert isinstance(self._host, MPI.Intracomm)  # as all parts of one are
        self.local_rank: int = self._host.rank
        self.ranks: list[int] = self._host.allgather(comm.rank)  # of this host
        row = np.dtype(
            [
                ("since", "f8"),
                ("waiting", "u1"),
                ("failed", "u1"),
                ("stop", "i8"),
                ("last", "i8"),
                ("place", f"S{PLACE}"),
                ("cause", f"S{CAUSE}"),
            ]
        )
        self._window = MPI.Win.Allocate_shared(row.itemsize, 1, comm=self._host)
        views = [_row(self._window.Shared_query(peer)[0], row) for peer in range(self._host.size)]
        self._rows = dict(zip(self.ranks, views, strict=True))
        self._own = self._rows[comm.rank]
        self._own[0] = (self._clock.now(), 0, 0, NEVER, NEVER, b"the start", b"")
        self._host.Barrier()

    def enter(self, place: str, waiting: bool = False) -> None:
        """Say which call this rank is in now, and whether it waits there for all others."""
        self._own["waiting"] = 0  # while the row changes
        self._own["since"] = self._clock.now()
        self._own["place"] = place.encode()[:PLACE]
        self._own["waiting"] = waiting

    def fail(self, cause: str) -> None:
        """Say that this rank has failed; ranks that wait will raise `RankFailed`."""
        self._own["cause"] = cause.encode()[:CAUSE]
        self._own["failed"] = 1

    def check(self) -> None:
        """Raise `RankFailed` when a rank of this host has failed, naming the first cause."""
        failed = self._failed()
        if failed:
            # Who failed because of another may have been read first: its cause is there by now.
            told = self._failed()
            rank, cause = min(told, key=lambda pair: pair[1].startswith("RankFailed"))
            raise RankFailed(f"rank {rank} failed: {cause}", rank)

    def _failed(self) -> list[tuple[int, str]]:
        return [
            (rank, row["cause"][0].decode(errors="replace"))
            for rank, row in self._rows.items()
            if row["failed"][0] and row is not self._own
        ]

    def deadlock(self, seconds: float) -> dict[int, str]:
        """The call of each rank, if each waits for all others in one, and not all in the same.

        Args:
            seconds: for which they must have waited.
        """
        latest = self._clock.now() - seconds
        rows = sorted(self._rows.items())
        if not all(row["waiting"][0] and row["since"][0] < latest for _, row in rows):
            return {}
        places = {rank: row["place"][0].decode(errors="replace") for rank, row in rows}
        return places if len(set(places.values())) > 1 else {}

    def stop_after(self, step: int) -> None:
        """Ask all ranks to stop when they have done this step."""
        self._own["stop"] = step

    def asked_to_stop(self, step: int) -> bool:
        """Whether rank 0 wants training to end with this step or an earlier one."""
        return 0 in self._rows and bool(self._rows[0]["stop"][0] <= step)

    def end_after(self, step: int) -> None:
        """Say that training has come to its end for this rank: all go on to this step only."""
        self._own["last"] = step

    def ends_with(self, step: int) -> bool:
        """Whether a rank of this host has said so of this step or an earlier one."""
        return any(bool(row["last"][0] <= step) for row in self._rows.values())

    def elsewhere(self, place: str) -> str:
        """The ranks that are not in `place`, each with the call it is in and for how long."""
        now = self._clock.now()
        found = [
            f"rank {rank} is in {there} for {now - row['since'][0]:.0f} s"
            for rank, row in sorted(self._rows.items())
            if (there := row["place"][0].decode(errors="replace")) != place
        ]
        return "; ".join(found) or "every rank of this host is in this call"

    def close(self) -> None:
        """Free the window (collective over the ranks of this host)."""
        self._rows.clear()
        del self._own
        self._window.Free()
        self._host.Free()


def _row(memory: Any, kind: np.dtype[Any]) -> np.ndarray:
    return np.ndarray(1, kind, memory)
