"""The status board: a table in which each rank writes its current call, for error messages."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator.clock import Clock
from labkit.communicator.status_table import ENDED, NEVER, PEERS, PLACE, HostRanks, StatusTable

if TYPE_CHECKING:
    from mpi4py import MPI


# The relay thread polls for bulletins (status rows) of other hosts every `POLL_INTERVAL` seconds.
POLL_INTERVAL = 0.02
# The relay thread sends a bulletin to each host every `SEND_INTERVAL` seconds. The thread sends
# earlier if a rank waits for a confirmation.
SEND_INTERVAL = 0.1
# The call `close(patient=True)` waits at most `CLOSE_TIMEOUT` seconds for the last bulletins
# (status rows) of other hosts.
CLOSE_TIMEOUT = 3.0
# The call `close(patient=False)` may take at most `QUICK_CLOSE_TIMEOUT` seconds to send the last
# bulletin (status rows).
QUICK_CLOSE_TIMEOUT = 1.0


class Relay:
    """A thread of each rank; only the thread of a host's first rank exchanges bulletins.

    A bulletin is a message with the status rows of one host. Each host receives a bulletin from
    every other host ten times a second. If the field `mark` of a row changes, the bulletin is sent
    at once. A rank soon learns whether other hosts have received its new status. At most one
    bulletin is in flight per direction, so bulletins do not accumulate on a broken link.

    The threads of a host's other ranks only stand by as replacements. If a host's first rank dies,
    the next rank's thread runs the relay. A takeover of the relay needs ULFM (`mpiexec --with-ft
    ulfm`). After a takeover, the relays of other hosts exchange bulletins with the new relay
    thread.

    Args:
        comm: An mpi4py communicator of all ranks, in the order of the table's rows. Only relay
            threads use the communicator `comm`.
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
            patient: Whether to wait up to 3 s for other hosts' last bulletins. With `patient`, the
                relays of all hosts must close at the same time.

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
        except Exception as error:  # the relay writes the error to the status table
            cause = (
                f"its relay of the status to other hosts failed: {type(error).__name__}: {error}"
            )
            self._table.fail(self._comm.rank, cause)

    def _stand_by(self) -> bool:
        """Wait until all earlier ranks of this host have died; return False if the relay closes."""
        from mpi4py import MPI

        for rank in self._table.local_ranks[: self._table.local_ranks.index(self._comm.rank)]:
            try:
                # The receive `sentinel` never gets a message; it fails if `rank` dies, and thus
                # detects the death.
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
                # The relay thread polls faster while a rank waits until other hosts confirm its
                # status row.
                self._wake.wait(POLL_INTERVAL if self._table.is_confirmed() else 1e-3)
                self._wake.clear()
            if not self._abandoned:
                self._exchange_last()
        finally:
            # After the relay thread has ended, ranks need not wait for confirmations from other
            # hosts.
            self._table.confirmed[...] = NEVER

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
        # The first living rank of the other host runs that host's relay. The list `_ranks` starts
        # with the first living rank of the other host.
        self._ranks = [*table.hosts[number].ranks]
        self._in, self._out = table.blank(number), table.blank(table.host_index)
        self._incoming = self._sent = MPI.REQUEST_NULL
        # The attribute `_sent_last` tells whether this host has sent its last status message.
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
                self.has_ended = not self._ranks
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


# After the loss of a host or a rank, MPI_Finalize may take at most `FINALIZE_TIMEOUT` seconds.
FINALIZE_TIMEOUT = 2


class RankFailed(LabkitError):
    """Another rank has failed, so that this rank cannot continue.

    Attributes:
        rank: The number of the failed rank.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankDied(RankFailed):
    """The process of a rank has ended; the other ranks may continue, see `Communicator.shrink`.

    Attributes:
        ranks: All dead ranks that this rank has detected, by their numbers before any rank died.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        names = ", ".join(map(str, ranks))
        super().__init__(f"rank {names or '?'} failed: {ENDED}", ranks[0] if ranks else -1)
        self.ranks = tuple(ranks)


class HostSilent(RankFailed):
    """A host has sent no status for some seconds, because the host or its link failed."""


class WaitTooLong(LabkitError):
    """A wait has exceeded its timeout; the error message names the ranks and their calls."""


class Mismatch(LabkitError):
    """Ranks are in different calls or differ in arguments; the message names ranks and calls."""


class StatusBoard:
    """The status of all ranks: one row per rank with its call, the call's start, and any failure.

    The rows are bytes in memory that the ranks of a host share. Writing a status takes about a
    microsecond. A read of a row needs no reply from the row's rank. A rank can therefore read even
    the row of a rank that hangs. A thread of each host's first rank sends the rows to the other
    hosts, see `Relay`. The rows of other hosts are a few tenths of a second old.

    Args:
        comm: The mpi4py communicator of the ranks.
        clock: The clock of this host.
        limits: The timeouts of waits, in seconds.
        numbers: The number of each rank before any rank died, for error messages about dead ranks.

    Attributes:
        local_rank: The number of this rank among the ranks of the same host, from 0.
        ranks: The numbers of the ranks that run on this host.
        deadlocked_after: Seconds after which waits of all ranks in different calls count as a
            deadlock.
    """

    def __init__(
        self, comm: MPI.Intracomm, clock: Clock, limits: Limits, numbers: Sequence[int]
    ) -> None:
        from mpi4py import MPI

        from labkit.communicator.status_table import install_stack_handler

        self._clock, self._rank = clock, comm.rank
        self.limits, self._numbers = limits, numbers
        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
        # The assertion only tells the type checker the class of `_host`.
        assert isinstance(self._host, MPI.Intracomm)
        self.local_rank: int = self._host.rank
        self.ranks: list[int] = self._host.allgather(comm.rank)
        host_ranks = HostRanks(tuple(self.ranks), MPI.Get_processor_name())
        hosts = (
            [host_ranks]
            if self._host.size == comm.size
            else sorted(set(comm.allgather(host_ranks)))
        )
        first = self.local_rank == 0
        nbytes = StatusTable.nbytes(hosts) if first else 0
        self._window = MPI.Win.Allocate_shared(nbytes, 1, comm=self._host)
        self._table = StatusTable(self._window.Shared_query(0)[0], hosts, hosts.index(host_ranks))
        self._row = self._table.rows[comm.rank : comm.rank + 1]
        if first:
            self._table.clear(clock.now())
        self._host.Barrier()
        install_stack_handler()
        self._row["pid"] = os.getpid()
        # Between hosts, waits may be long without a deadlock, because links may be slow or
        # interrupted.
        self.deadlocked_after = limits.deadlock if len(hosts) == 1 else limits.apart
        self._relay: Relay | None = None
        if len(hosts) > 1:
            self._between = comm.Dup()
            self._relay = Relay(self._between, self._table, clock)
            # If a failure prevents the call of `close`, the finalizer sends this host's last
            # bulletin (its status rows).
            self._end = weakref.finalize(self, self._relay.close, patient=False)

    def enter(self, call: str, waiting: bool = False, number: int = 0) -> None:
        """Write the current call of this rank into its row.

        Args:
            call: The name of the call.
            waiting: Whether this rank waits in the call for all other ranks.
            number: The number of the schedule's current round, from 1; 0: the call has no rounds.
        """
        # The value 0 of `waiting` marks the row as incomplete while the other fields are written.
        self._row["waiting"] = 0
        self._row["since"] = self._clock.now()
        self._row["place"] = call.encode()[:PLACE]
        self._row["round"] = number
        self._row["waiting"] = waiting

    def fail(self, cause: str) -> None:
        """Record that this rank has failed, so that waiting ranks raise `RankFailed`.

        Args:
            cause: The error text of the failure.
        """
        self._table.fail(self._rank, cause)
        if self._relay is not None:
            self._relay.wake()

    def mark_dead(self, dead: Sequence[int]) -> RankDied:
        """Record the failure of all ranks that MPI reports as dead; return the error to raise."""
        for rank in dead:
            self._table.die(rank)
        return RankDied([self._numbers[rank] for rank in dead])

    def raise_failures(self) -> None:
        """Raise an error if another rank or host has failed.

        Raises:
            RankFailed: Another rank has failed; the message names the original cause.
            HostSilent: Another host has sent no status for some seconds.
        """
        silent = self._table.silent_host(self.limits.silent)
        if silent is not None:
            atexit.register(exit_without_finalize)
        failed = self._failures()
        if failed:
            # The first read of the status table may miss the original failure and show only its
            # consequence. A second read of the status table also shows the original failure.
            failures = self._failures()
            rank, cause = min(failures, key=lambda pair: pair[1].startswith("RankFailed"))
            if cause == ENDED:
                raise RankDied([self._numbers[rank]])
            raise RankFailed(f"rank {rank} failed: {cause}", rank)
        if silent is not None:
            (ranks, name), seconds = silent
            raise HostSilent(
                f"host {name} with rank {', '.join(map(str, ranks))} has sent no status for "
                f"{seconds:.0f} s: the host, or the link to it, has failed",
                ranks[0],
            )

    def _failures(self) -> list[tuple[int, str]]:
        rows = self._table.rows
        return [
            (rank, rows["cause"][rank].decode(errors="replace"))
            for rank in rows["failed"].nonzero()[0].tolist()
            if rank != self._rank
        ]

    def find_deadlock(self) -> dict[int, str]:
        """Return the call of each rank if the ranks wait for each other in different calls.

        A deadlock means that, by their last status, all ranks have waited for at least
        `deadlocked_after` seconds.

        Returns:
            The name of each rank's call, by rank; empty if there is no deadlock.
        """
        rows = self._table.rows
        latest = min(self._clock.now(), self._table.bulletin_times.min()) - self.deadlocked_after
        if not (rows["waiting"].all() and (rows["since"] < latest).all()):
            return {}
        places = self._calls()
        return places if len(set(places.values())) > 1 else {}

    def request_stop(self, step: int) -> None:
        """Request that all ranks stop after the training step `step`."""
        self._row["stop"] = step
        self._wait_until_confirmed()

    def is_stop_requested(self, step: int) -> bool:
        """Return whether rank 0 has requested a stop after `step` or an earlier training step."""
        return bool(self._table.rows["stop"][0] <= step)

    def request_checkpoint(self, step: int) -> None:
        """Request that all ranks save their state after the training step `step`."""
        self._row["keep"] = step
        self._wait_until_confirmed()

    def is_checkpoint_requested(self, step: int) -> bool:
        """Return whether rank 0 has requested a checkpoint after exactly training step `step`."""
        return bool(self._table.rows["keep"][0] == step)

    def count(self, *numbers: int) -> None:
        """Publish this rank's `COUNTS` progress numbers, whose meaning the caller defines."""
        self._row["counts"] = numbers

    def set_quiescent(self, time: int) -> None:
        """Report that the progress numbers (counts) of this rank no longer change.

        Args:
            time: The number of the phase, from 1, in which the counts stay constant. The number 0
                means that the counts change again.
        """
        self._row["stands"] = time

    def counts(self) -> np.ndarray:
        """Return the progress numbers of all ranks, as an array of shape (size, COUNTS).

        The progress numbers of ranks on other hosts are a few tenths of a second old.
        """
        rows: np.ndarray = self._table.rows["counts"]
        return rows

    def all_quiescent(self, time: int) -> bool:
        """Return whether all ranks have constant counts in a phase; later reads are then final."""
        return bool((self._table.rows["stands"] == time).all())

    def announce_end(self, step: int) -> None:
        """Announce that this rank ends training after `step`, so that every rank does so, too."""
        self._row["last"] = step
        self._wait_until_confirmed()

    def has_ended(self, step: int) -> bool:
        """Return whether any rank has announced the end of its training at or before `step`."""
        return bool((self._table.rows["last"] <= step).any())

    def _wait_until_confirmed(self) -> None:
        """Wait until all hosts have received the row of this rank.

        Before a call that other ranks skip, all hosts must receive this rank's row.

        Raises:
            RankFailed: Another rank has failed during the wait.
        """
        self._row["mark"] += 1
        if self._relay is not None:
            self._relay.wake()
        while not self._table.is_confirmed(self._rank):
            self.raise_failures()
            self._clock.sleep(1e-3)

    def _calls(self) -> dict[int, str]:
        places = self._table.rows["place"].tolist()
        return {rank: call.decode(errors="replace") for rank, call in enumerate(places)}

    def request_snapshots(self) -> None:
        """Request a process snapshot of every rank; other hosts answer within a second."""
        self._row["asks"] += 1
        if self._relay is not None:
            self._relay.wake()
        self._table.record_snapshots(self._clock)

    def describe_ranks(self, local_call: str) -> str:
        """Return a text with each rank's call, the call's duration, and the last process snapshot.

        Ranks outside `local_call` come first in the text, because the ranks inside `local_call`
        wait for them.

        Args:
            local_call: The name of the call in which this rank waits.
        """
        now, rows = self._clock.now(), self._table.rows
        lines: tuple[list[str], list[str]] = [], []
        for rank, call in self._calls().items():
            turn = f", round {rows['round'][rank]}" if rows["round"][rank] else ""
            snapshot = rows["look"][rank].decode(errors="replace")
            where = "waits there too" if call == local_call else f"is in {call}"
            line = f"rank {rank} {where}{turn} for {now - rows['since'][rank]:.0f} s"
            lines[call == local_call].append(f"{line} ({snapshot})" if snapshot else line)
        return "; ".join(lines[0] + lines[1])

    def tally(self, kind: str, peer: int) -> None:
        """Count one message that this rank sent to, or received from, another rank.

        Args:
            kind: "sent" for a message to `peer`, "got" for a message from `peer`.
            peer: The number of the other rank.
        """
        if peer < PEERS:
            self._row[kind][0, peer] += 1

    def describe_lost_messages(self) -> str:
        """Return a text that lists pairs of ranks with lost messages; "" if no message was lost."""
        rows = self._table.rows[:PEERS]
        pairs = np.argwhere(rows["sent"][:, : len(rows)] != rows["got"][:, : len(rows)].T)
        routes = ", ".join(f"from rank {source} to rank {to}" for source, to in pairs.tolist())
        return f"; these messages were sent but not received: {routes}" if routes else ""

    def abandon(self) -> None:
        """Stop using the shared window, because MPI cannot free it without the dead rank."""
        if self._relay is not None:
            self._end.detach()
            self._relay.abandon()

    def close(self) -> None:
        """Free the shared memory of the status board (collective)."""
        if self._relay is not None:
            self._end.detach()
            # MPI cannot free the communicator `_between` while a receive for another host's last
            # bulletin (status rows) is pending.
            if all(self._host.allgather(self._relay.close(patient=True))):
                self._between.Free()
        del self._row, self._table
        self._window.Free()
        self._host.Free()


def exit_without_finalize() -> None:
    """Set an alarm that ends this process if MPI_Finalize waits for dead ranks forever."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(FINALIZE_TIMEOUT)
