"""The relay of a host: tells other hosts what its ranks write on the board, and hears theirs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.clock import Clock
from labkit.communicator.deaths import is_broken
from labkit.communicator.sheet import NEVER, Sheet

if TYPE_CHECKING:
    from mpi4py import MPI

LOOK_EVERY = 0.02  # seconds between two looks for bulletins
TELL_EVERY = 0.1  # seconds between two bulletins, where nobody waits for one
LEAVE = 3.0  # seconds that other hosts get for their last bulletin
PART = 1.0  # and that they get to take this one's, where nobody waits for theirs


class Relay:
    """A thread of the first rank of each host, which exchanges bulletins with those of the others.

    A bulletin goes to each host ten times a second, and at once where a mark has risen, so that who
    has written something knows soon that it was seen. At most one is under way in each direction:
    over a link that is down they do not pile up.

    Args:
        comm: of the first ranks of all hosts, in the order of the sheet; used by this thread alone.
        sheet: of this host.
        clock: of this host.
    """

    def __init__(self, comm: MPI.Intracomm, sheet: Sheet, clock: Clock) -> None:
        self._sheet, self._clock = sheet, clock
        self._peers = [_Peer(comm, n, sheet) for n in range(comm.size) if n != comm.rank]
        self._wake, self._ends, self._patient = threading.Event(), False, False
        self._comm, self._abandoned = comm, False
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
            while not self._ends:
                self._look()
                for peer in self._peers:
                    peer.tell(self._clock.now())
                # While a rank waits for it to be seen, look at once for who says so.
                self._wake.wait(LOOK_EVERY if self._sheet.everywhere() else 1e-3)
                self._wake.clear()
            if not self._abandoned:
                self._leave()
        except Exception as error:  # no thread's error is seen: the board tells it to all
            if is_broken(self._comm):  # of a death, whoever waits is told by MPI itself
                return
            first = self._sheet.hosts[self._sheet.here].ranks[0]
            self._sheet.fail(first, f"its relay to other hosts: {type(error).__name__}: {error}")
        finally:
            self._sheet.seen[...] = NEVER  # nobody waits for what does not come any more

    def _look(self) -> None:
        for peer in self._peers:
            peer.hear(self._clock.now())
        self._sheet.turned[...] = self._clock.now()

    def _leave(self) -> None:
        limit = self._clock.now() + (LEAVE if self._patient else PART)
        while (now := self._clock.now()) < limit:
            self._look()
            gone = sum(peer.tell(now, last=True) for peer in self._peers) == len(self._peers)
            if gone and (not self._patient or all(peer.left for peer in self._peers)):
                break
            self._clock.sleep(1e-3)
        for peer in self._peers:
            peer.forget()


class _Peer:
    """The relay of another host, as this one sees it."""

    def __init__(self, comm: MPI.Intracomm, number: int, sheet: Sheet) -> None:
        from mpi4py import MPI

        self._comm, self._number, self._sheet = comm, number, sheet
        self._in, self._out = sheet.blank(number), sheet.blank(sheet.here)
        self._sent: MPI.Request = MPI.REQUEST_NULL
        self._told_at, self._said = -np.inf, False  # the last bulletin
        self.left = False
        self._post()

    def _post(self) -> None:
        self._coming = self._comm.Irecv(self._in.reshape(1).view(np.uint8), self._number)

    def hear(self, now: float) -> None:
        """Take what has come."""
        while not self.left and self._coming.Test():
            self.left = self._sheet.read(self._number, self._in, now)
            if not self.left:
                self._post()

    def tell(self, now: float, last: bool = False) -> bool:
        """Send a bulletin, if one is due and the former is on its way; whether the last one is."""
        if not self._sent.Test():
            return False
        if self._said:
            return True
        news = np.any(self._out["seen"] != self._sheet.rows["mark"])
        if last or news or now - self._told_at >= TELL_EVERY:
            self._sheet.write(self._out, now, last)
            self._sent = self._comm.Isend(self._out.reshape(1).view(np.uint8), self._number)
            self._told_at, self._said = now, last
        return False

    def forget(self) -> None:
        """Let go of bulletins that have not come."""
        if not self.left:
            self._coming.Cancel()
