"""The relay of a host: tells other hosts what its ranks write on the board, and hears theirs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.clock import Clock
from labkit.communicator.status_table import NEVER, StatusTable

if TYPE_CHECKING:
    from mpi4py import MPI

LOOK_EVERY = 0.02  # seconds between two looks for bulletins
TELL_EVERY = 0.1  # seconds between two bulletins, where nobody waits for one
LEAVE = 3.0  # seconds that other hosts get for their last bulletin
PART = 1.0  # and that they get to take this one's, where nobody waits for theirs


class Relay:
    """A thread of each rank, of which that of a host's first exchanges bulletins with other hosts.

    A bulletin goes to each host ten times a second, and at once where a mark has risen, so that who
    has written something knows soon that it was seen. At most one is under way in each direction:
    over a link that is down they do not pile up.

    The others stand by. Where MPI outlives the death of a rank (`mpiexec --with-ft ulfm`), the next
    one of its host takes over, and those of other hosts turn to it.

    Args:
        comm: of all ranks, in the order of the sheet; used by these threads alone.
        sheet: of this host.
        clock: of this host.
    """

    def __init__(self, comm: MPI.Intracomm, sheet: StatusTable, clock: Clock) -> None:
        self._comm, self._sheet, self._clock = comm, sheet, clock
        self._peers: list[_Peer] = []
        self._wake, self._ends, self._patient = threading.Event(), False, False
        self._asked, self._abandoned = 0, False
        self._thread = threading.Thread(target=self._run, name="labkit relay", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look at the sheet now."""
        self._wake.set()

    def close(self, patient: bool) -> bool:
        """Send the last bulletins, and end; whether all others' last ones have come.

        Args:
            patient: wait for these, a few seconds; all hosts are at this point.
        """
        self._patient, self._ends = patient, True
        self._wake.set()
        self._thread.join()
        return all(peer.left for peer in self._peers)

    def abandon(self) -> None:
        """End, without a word: a rank is gone."""
        self._abandoned = self._ends = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._stand_by():
                self._exchange()
        except Exception as error:  # no thread's error is seen: the board tells it to all
            told = f"its relay to other hosts: {type(error).__name__}: {error}"
            self._sheet.fail(self._comm.rank, told)

    def _stand_by(self) -> bool:
        """Wait for the turn of this rank: all before it on its host have died; whether it came."""
        from mpi4py import MPI

        for rank in self._sheet.own[: self._sheet.own.index(self._comm.rank)]:
            try:
                watched = self._comm.Irecv(bytearray(1), rank)  # to which nothing ever comes
                while not watched.Test():
                    if self._ends:
                        watched.Cancel()
                        return False
                    self._wake.wait(TELL_EVERY)
                    self._wake.clear()
            except MPI.Exception as error:
                _only_death(error)
                self._sheet.die(rank)
        return True

    def _exchange(self) -> None:
        others = [n for n in range(len(self._sheet.hosts)) if n != self._sheet.here]
        try:
            self._peers = [_Peer(self._comm, n, self._sheet) for n in others]
            while not self._ends:
                self._meet()
                # While a rank waits for it to be seen, look at once for who says so.
                self._wake.wait(LOOK_EVERY if self._sheet.everywhere() else 1e-3)
                self._wake.clear()
            if not self._abandoned:
                self._leave()
        finally:
            self._sheet.seen[...] = NEVER  # nobody waits for what does not come any more

    def _meet(self, last: bool = False) -> bool:
        now = self._clock.now()
        gone = [peer.meet(now, last) for peer in self._peers]
        self._sheet.turned[...] = now
        if (asked := int(self._sheet.rows["asks"].sum())) != self._asked:
            self._asked = asked
            self._sheet.look(self._clock)
        return all(gone)

    def _leave(self) -> None:
        limit = self._clock.now() + (LEAVE if self._patient else PART)
        while self._clock.now() < limit:
            if self._meet(last=True) and (
                not self._patient or all(peer.left for peer in self._peers)
            ):
                break
            self._clock.sleep(1e-3)
        for peer in self._peers:
            peer.forget()


class _Peer:
    """The relay of another host, as this one sees it."""

    def __init__(self, comm: MPI.Intracomm, number: int, sheet: StatusTable) -> None:
        from mpi4py import MPI

        self._comm, self._number, self._sheet = comm, number, sheet
        self._ranks = [*sheet.hosts[number].ranks]  # the first of them relays
        self._in, self._out = sheet.blank(number), sheet.blank(sheet.here)
        self._coming = self._sent = MPI.REQUEST_NULL
        self._told_at, self._said = -np.inf, False  # the last bulletin
        self.left = False

    def meet(self, now: float, last: bool) -> bool:
        """Take what has come, and tell what is due; whether the last bulletin is on its way."""
        from mpi4py import MPI

        try:
            self._hear(now)
            return self._tell(now, last)
        except MPI.Exception as error:
            _only_death(error)
            self._coming = self._sent = MPI.REQUEST_NULL
            if not self.left:
                self._sheet.die(self._ranks.pop(0))
                self.left = not self._ranks  # nobody of it is there any more
            if self.left:
                self._sheet.leave(self._number)
            self._said = self.left
            return self._said

    def _hear(self, now: float) -> None:
        while not self.left:
            if not self._coming:
                whole = self._in.reshape(1).view(np.uint8)
                self._coming = self._comm.Irecv(whole, self._ranks[0])
            if not self._coming.Test():
                return
            self.left = self._sheet.read(self._number, self._in, now)

    def _tell(self, now: float, last: bool) -> bool:
        if not self._sent.Test():
            return False
        if self._said:
            return True
        news = np.any(self._out["seen"] != self._sheet.rows["mark"])
        if last or news or now - self._told_at >= TELL_EVERY:
            self._sheet.write(self._out, now, last)
            self._sent = self._comm.Isend(self._out.reshape(1).view(np.uint8), self._ranks[0])
            self._told_at, self._said = now, last
        return False

    def forget(self) -> None:
        """Let go of bulletins that have not come."""
        if self._coming:
            self._coming.Cancel()


def _only_death(error: MPI.Exception) -> None:
    """Raise it again, unless it says that a process has ended."""
    from mpi4py import MPI

    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error
