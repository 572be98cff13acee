"""The relay of a host: a thread that exchanges the rows of the status table with other hosts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from labkit.communicator.clock import Clock
from labkit.communicator.status_table import NEVER, StatusTable

if TYPE_CHECKING:
    from mpi4py import MPI

POLL_INTERVAL = 0.02  # seconds between two polls for bulletins of other hosts
SEND_INTERVAL = 0.1  # seconds between two bulletins to a host, if no rank waits for a confirmation
CLOSE_TIMEOUT = 3.0  # seconds that `close(patient=True)` waits for other hosts' last bulletins
QUICK_CLOSE_TIMEOUT = 1.0  # seconds that `close(patient=False)` may take to send the last bulletin


class Relay:
    """A thread of each rank; only the thread of a host's first rank exchanges bulletins.

    A bulletin is a message with the status rows of one host. Each host receives a bulletin from
    every other host ten times a second; after a change of a row's `mark`, the bulletin is sent at
    once. The rank that changed its row therefore soon learns that other hosts have received the new
    status. At most one bulletin is in flight per direction, so bulletins do not accumulate on a
    broken link.

    The threads of the other ranks only wait for the death of the earlier ranks of their host. If
    the first rank of a host dies under ULFM (`mpiexec --with-ft ulfm`), the thread of the host's
    next rank replaces its relay. The relays of other hosts then exchange bulletins with the rank
    that replaced the dead one.

    Args:
        comm: An mpi4py communicator of all ranks, in the order of the table's rows; only relay
            threads use it.
        table: The status table of this host.
        clock: The clock of this host.
    """

    def __init__(self, comm: MPI.Intracomm, table: StatusTable, clock: Clock) -> None:
        self._comm, self._table, self._clock = comm, table, clock
        self._peers: list[_Peer] = []
        self._wake, self._is_closing, self._patient = threading.Event(), False, False
        self._requests, self._abandoned = 0, False
        self._thread = threading.Thread(target=self._run, name="labkit relay", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread, which then checks the status table for changes."""
        self._wake.set()

    def close(self, patient: bool) -> bool:
        """Send the last bulletin to every other host, and end the thread.

        Args:
            patient: Whether to wait up to 3 s for the last bulletins of other hosts; the relays of
                these hosts must then close at the same time.

        Returns:
            Whether the last bulletins of all other hosts have arrived.
        """
        self._patient, self._is_closing = patient, True
        self._wake.set()
        self._thread.join()
        return all(peer.has_ended for peer in self._peers)

    def abandon(self) -> None:
        """End the thread after the death of a rank, without sending last bulletins."""
        self._abandoned = self._is_closing = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._stand_by():
                self._exchange()
        except Exception as error:  # the error is written to the status table
            cause = (
                f"its relay of the status to other hosts failed: {type(error).__name__}: {error}"
            )
            self._table.fail(self._comm.rank, cause)

    def _stand_by(self) -> bool:
        """Wait until all earlier ranks of this host have died; return False if the relay closes."""
        from mpi4py import MPI

        for rank in self._table.local_ranks[: self._table.local_ranks.index(self._comm.rank)]:
            try:
                # No rank sends a message for this receive; the receive fails if the rank dies.
                sentinel = self._comm.Irecv(bytearray(1), rank)
                while not sentinel.Test():
                    if self._is_closing:
                        sentinel.Cancel()
                        return False
                    self._wake.wait(SEND_INTERVAL)
                    self._wake.clear()
            except MPI.Exception as error:
                _raise_unless_death(error)
                self._table.die(rank)
        return True

    def _exchange(self) -> None:
        others = [n for n in range(len(self._table.hosts)) if n != self._table.host_index]
        try:
            self._peers = [_Peer(self._comm, n, self._table) for n in others]
            while not self._is_closing:
                self._exchange_bulletins()
                # Poll faster while a rank waits until other hosts confirm its row.
                self._wake.wait(POLL_INTERVAL if self._table.is_confirmed() else 1e-3)
                self._wake.clear()
            if not self._abandoned:
                self._exchange_last()
        finally:
            self._table.confirmed[...] = NEVER  # releases ranks that wait for confirmations

    def _exchange_bulletins(self, last: bool = False) -> bool:
        now = self._clock.now()
        done = [peer.exchange(now, last) for peer in self._peers]
        self._table.poll_time[...] = now
        if (requests := int(self._table.rows["asks"].sum())) != self._requests:
            self._requests = requests
            self._table.record_snapshots(self._clock)
        return all(done)

    def _exchange_last(self) -> None:
        limit = self._clock.now() + (CLOSE_TIMEOUT if self._patient else QUICK_CLOSE_TIMEOUT)
        while self._clock.now() < limit:
            if self._exchange_bulletins(last=True) and (
                not self._patient or all(peer.has_ended for peer in self._peers)
            ):
                break
            self._clock.sleep(1e-3)
        for peer in self._peers:
            peer.cancel()


class _Peer:
    """The connection from this host's relay to the relay of another host."""

    def __init__(self, comm: MPI.Intracomm, number: int, table: StatusTable) -> None:
        from mpi4py import MPI

        self._comm, self._number, self._table = comm, number, table
        # The first living rank in this list runs the relay.
        self._ranks = [*table.hosts[number].ranks]
        self._in, self._out = table.blank(number), table.blank(table.host_index)
        self._incoming = self._sent = MPI.REQUEST_NULL
        # The two fields record the time of the last send, and whether this host's last bulletin has
        # been sent.
        self._sent_at, self._sent_last = -np.inf, False
        self.has_ended = False

    def exchange(self, now: float, last: bool) -> bool:
        """Receive and send bulletins; return whether the last bulletin has been sent completely."""
        from mpi4py import MPI

        try:
            self._receive(now)
            return self._send(now, last)
        except MPI.Exception as error:
            _raise_unless_death(error)
            self._incoming = self._sent = MPI.REQUEST_NULL
            if not self.has_ended:
                self._table.die(self._ranks.pop(0))
                self.has_ended = not self._ranks  # all ranks of the host are dead
            if self.has_ended:
                self._table.leave(self._number)
            self._sent_last = self.has_ended
            return self._sent_last

    def _receive(self, now: float) -> None:
        while not self.has_ended:
            if not self._incoming:
                whole = self._in.reshape(1).view(np.uint8)
                self._incoming = self._comm.Irecv(whole, self._ranks[0])
            if not self._incoming.Test():
                return
            self.has_ended = self._table.read(self._number, self._in, now)

    def _send(self, now: float, last: bool) -> bool:
        if not self._sent.Test():
            return False
        if self._sent_last:
            return True
        news = np.any(self._out["seen"] != self._table.rows["mark"])
        if last or news or now - self._sent_at >= SEND_INTERVAL:
            self._table.write(self._out, now, last)
            self._sent = self._comm.Isend(self._out.reshape(1).view(np.uint8), self._ranks[0])
            self._sent_at, self._sent_last = now, last
        return False

    def cancel(self) -> None:
        """Cancel the pending receive of a bulletin."""
        if self._incoming:
            self._incoming.Cancel()


def _raise_unless_death(error: MPI.Exception) -> None:
    """Raise an MPI error again, unless the error only reports the death of a process."""
    from mpi4py import MPI

    if error.Get_error_class() != MPI.ERR_PROC_FAILED:
        raise error
