"""The wait policy of a rank: a waiting rank detects failures and yields its core."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator.clock import Clock
from labkit.communicator.membership import FailureGuard, dead_ranks, is_broken, outlives
from labkit.communicator.status_board import Mismatch, StatusBoard, WaitTooLong

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(slots=True)
class Traffic:
    """The messages, bytes and seconds of one rank's communication; the counts never decrease.

    Any algorithm for a collective must send a minimum number of bytes. For MPI's collectives,
    `wire_bytes` and `link_bytes` count the minimum number of bytes.

    Attributes:
        messages: The number of messages sent.
        payload_bytes: Total bytes of the buffers passed to collectives and sends.
        wire_bytes: Bytes that this rank sent to other ranks.
        link_bytes: The bytes of `wire_bytes` that this rank sent to other hosts.
        wait_seconds: Seconds in which this rank waited for other ranks to reach a call.
        transfer_seconds: Seconds in which this rank transferred and added data after all ranks had
            arrived.
        aside_seconds: Seconds of requests and bookkeeping while another process does the training
            work; training-step times exclude these seconds.
    """

    messages: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    link_bytes: int = 0
    wait_seconds: float = 0.0
    transfer_seconds: float = 0.0
    aside_seconds: float = 0.0

    def copy(self) -> Traffic:
        """Return a copy of this meter with its current counts."""
        return Traffic(*(getattr(self, field.name) for field in fields(self)))

    def since(self, earlier: Traffic) -> Traffic:
        """Return the increase of all counts since an earlier copy of this meter."""
        return Traffic(
            *(getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self))
        )


# A sleep between two polls lasts at least `MIN_SLEEP` and at most `MAX_SLEEP` seconds.
MIN_SLEEP, MAX_SLEEP = 20e-6, 1e-3
# A sleep between two polls lasts `SLEEP_FRACTION` times the duration of the wait so far.
SLEEP_FRACTION = 0.01
SLEEP_OVERRUN = 300e-6  # A sleep may last up to `SLEEP_OVERRUN` seconds longer than requested.
SPINS = 250  # A wait begins with `SPINS` polls without a sleep, which take about 0.3 ms.
# A waiting rank checks the status board and the clock once every `_CHECK_EVERY` polls.
_CHECK_EVERY = 16
# Collectives use `_TAGS` different MPI tags, which are above the tags of all other messages.
_TAGS = 1 << 27


class WaitPolicy:
    """The waits of one rank inside named calls; a wait raises an error if another rank fails.

    The name of a call contains everything on which the ranks must agree. A call's name contains its
    purpose, its operation, and its type of data. Ranks exchange the CRC-32 of the call's name
    before the call. In some calls, the CRC-32 is instead the tag of the call's messages. The CRC-32
    ensures that a rank never receives data of another call.

    Args:
        comm: The mpi4py communicator of the ranks that wait for each other.
        board: The status board of the ranks.
        traffic: The traffic meter, which also counts seconds of waits.
        clock: The clock that measures the waits.
        timeout: Seconds after which a wait raises `WaitTooLong`.
        outer: The wait policy of the larger group from which `comm` was split. Failures in the
            larger group also end waits of `comm`. If `outer` is None, there is no larger group.

    Attributes:
        comm, board, traffic, clock: The constructor's arguments of the same names, for use by other
            modules.
        on_one_host: Whether all ranks run on one host and share memory.
        failure_guard: A context manager that raises `RankDied` if MPI reports an error and a rank
            is dead.
        call_name, code: The name of this rank's current call, and its CRC-32.
        first_error: The error that a wait of this rank has raised; None: no error.
        polite: Whether each wait sleeps between all polls, instead of spinning at its start.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        board: StatusBoard,
        traffic: Traffic,
        clock: Clock,
        timeout: float,
        outer: WaitPolicy | None = None,
    ) -> None:
        self.board, self.traffic, self.clock, self.timeout = board, traffic, clock, timeout
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.on_one_host = len(board.ranks) == self.size
        self.comm, self._outer = comm, outer
        self.first_error: LabkitError | None = None
        self.polite = False
        self.call_name, self.code = "", 0
        self._collective, self._since, self._snapshots_requested = False, 0.0, False
        self.failure_guard, self._outlives = FailureGuard(self.check_failures, clock), outlives()

    def name_call(self, name: str, collective: bool = True, detail: str = "") -> None:
        """Set the name of the call in which this rank waits next.

        Args:
            name: The name of the call, the same on all ranks.
            collective: Whether the call waits for all other ranks.
            detail: Further text about this rank's call for error messages; the text may differ
                between ranks.
        """
        self.call_name, self._collective = name + detail, collective
        self.code = zlib.crc32(name.encode())

    def count(self, nbytes: int, out: int) -> None:
        """Count one message in the traffic meter; a collective of MPI counts as one message.

        Args:
            nbytes: The number of bytes that this rank sends.
            out: The part of `nbytes` that this rank sends to other hosts. If all ranks are on one
                host, `out` is ignored.
        """
        self.traffic.messages += 1
        self.traffic.wire_bytes += nbytes
        self.traffic.link_bytes += 0 if self.on_one_host else out

    def count_to(self, peer: int, nbytes: int) -> None:
        """Count a message to the rank `peer` in the traffic meter."""
        self.count(nbytes, 0 if peer in self.board.ranks else nbytes)

    def tally(self, kind: str, peer: int) -> None:
        """Count one message that is sent to or received from another rank."""
        if self._outer is None:
            self.board.tally(kind, peer)

    def host_policy(self) -> WaitPolicy:
        """Return a wait policy for the ranks of this host, in rank order (collective)."""
        from mpi4py import MPI

        if self.on_one_host:
            return self
        host = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        # The assertion only tells the type checker the class of `host`.
        assert isinstance(host, MPI.Intracomm)
        return WaitPolicy(host, self.board, self.traffic, self.clock, self.timeout, self)

    def adopt_call(self, outer: WaitPolicy) -> None:
        """Copy the current call and `polite` from `outer`, the wait policy of the larger group."""
        if outer is not self:
            self.call_name, self.code = outer.call_name, outer.code
            self._collective, self.polite = outer._collective, outer.polite

    @property
    def tag(self) -> int:
        """The MPI tag of the current call's messages, different from the tags of other calls."""
        return _TAGS + self.code % _TAGS

    def start_wait(self, number: int = 0) -> float:
        """Start a wait of this rank and return its start time.

        Args:
            number: The number of the schedule's current round, from 1; 0 if the wait belongs to no
                round.
        """
        self.board.enter(self.call_name, self._collective, number)
        self._since, self._snapshots_requested = self.clock.now(), False
        return self._since

    def wait_all(self, requests: list[MPI.Request], number: int = 0) -> None:
        """Wait for MPI requests, with regular checks for failures.

        Args:
            requests: The MPI requests to complete.
            number: The number of the schedule's current round, from 1; 0 if the wait belongs to no
                round.
        """
        from mpi4py import MPI

        start = self.start_wait(number)
        polls = 0
        with self.failure_guard:
            while not MPI.Request.Testall(requests):
                self.pause(polls)
                polls += 1
        self.traffic.wait_seconds += self.clock.now() - start

    def barrier(self, label: str = "barrier") -> None:
        """Wait until every rank has reached this barrier.

        Raises:
            RankFailed: A rank has failed, or its host has become silent.
            WaitTooLong: A rank has not arrived within the timeout.
            Mismatch: Another rank is in a different call.
        """
        if self.size == 1:
            return
        self.name_call(label)
        self.allgather_scalar()
        self.board.enter(f"work after {label}")

    def allgather_scalar(self, value: float = 0.0) -> np.ndarray:
        """Run a barrier in which each rank sends its call's code and one number to all ranks.

        Returns:
            One number from each rank, in the order of the ranks.
        """
        table = np.zeros((self.size, 2))
        with self.failure_guard:
            request = self.comm.Iallgather(np.array([self.code, value], np.float64), table)
        self.wait_all([request])
        if np.any(table[:, 0] != self.code):
            self.raise_mismatch()
        self.check_wait()  # The check raises an error if a rank failed after it sent its value.
        return table[:, 1]

    def call(self, name: str, *arguments: Any) -> None:
        """Call a collective of the MPI library; its time does not count as a wait.

        Between hosts, the call is nonblocking and checks for failures, because a link between hosts
        may break. The failure mitigation of MPI (ULFM) also requires a nonblocking call. A blocking
        Allgatherv of Open MPI 5 returned zeros for missing data, without an error.

        Args:
            name: The name of the mpi4py communicator's method, such as "Bcast".
            arguments: The positional arguments of the mpi4py method `name`.
        """
        if self.on_one_host and not self._outlives:
            with self.failure_guard:
                getattr(self.comm, name)(*arguments)
            return
        waited = self.traffic.wait_seconds
        with self.failure_guard:
            self.wait_all([getattr(self.comm, f"I{name.lower()}")(*arguments)])
        self.traffic.wait_seconds = waited
        # Without `board.enter`, the status board would report this rank as waiting while it
        # computes.
        self.board.enter(f"work after {self.call_name}")

    def gather(self, value: Any) -> list[Any]:
        """Gather one pickled object from each rank, in rank order, inside the current call."""
        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.allgather_scalar(len(pickled)).astype(int)
        whole = np.empty(lengths.sum(), np.uint8)
        self.call("Allgatherv", pickled, (whole, lengths))
        self.board.enter(f"work after {self.call_name}")
        return [pickle.loads(part.data) for part in np.split(whole, np.cumsum(lengths)[:-1])]

    def share(self, value: Any, root: int) -> Any:
        """Broadcast the root's object, which is pickled, to every rank inside the current call."""
        pickled = np.frombuffer(pickle.dumps(value if self.rank == root else None), np.uint8).copy()
        length = int(self.allgather_scalar(len(pickled))[root])
        whole = pickled if self.rank == root else np.empty(length, np.uint8)
        self.call("Bcast", whole, root)
        self.board.enter(f"work after {self.call_name}")
        return pickle.loads(whole.data)

    def raise_mismatch(self, detail: str = "") -> NoReturn:
        """Raise `Mismatch` with all ranks' calls (collective: every rank must call this method).

        Args:
            detail: Further text about this rank's call for the error message.

        Raises:
            Mismatch: Always.
        """
        with self.failure_guard:
            names = self.comm.allgather(self.call_name + detail)
        self.first_error = Mismatch(_mismatch_text(dict(enumerate(names))))
        raise self.first_error

    def sleep_until(self, moment: float) -> None:
        """Sleep until the clock shows `moment`, without checks for failures."""
        self.clock.sleep(max(0.0, moment - self.clock.now() - SLEEP_OVERRUN))
        # The attribute `polite` is read after the first sleep. Another thread may change the
        # attribute `polite` during the sleep.
        self.clock.sleep_until(moment, exact=not self.polite)

    def pause(self, polls: int) -> None:
        """Yield the core between two polls; check for failures regularly if the wait is long.

        A short wait polls without sleeping (it spins). A longer wait sleeps between two polls. A
        spin loop would slow down a rank on the core's other hyperthread. Each sleep lasts 1 % of
        the wait so far. Each sleep lasts at least 20 µs and at most 1 ms. Waiting ranks sleep, so a
        core remains free for the computing rank even if many ranks wait.

        Args:
            polls: The number of polls that this wait has made so far.
        """
        if polls < SPINS and not self.polite:
            os.sched_yield()
            return
        waited = self.clock.now() - self._since
        self.clock.sleep(min(max(MIN_SLEEP, SLEEP_FRACTION * waited), MAX_SLEEP))
        if polls % _CHECK_EVERY == 0:
            self.check_wait()

    def check_wait(self) -> None:
        """Check for failures, a deadlock and a timeout; store an error before raising it.

        Raises:
            RankFailed: Another rank or host has failed.
            Mismatch: The ranks wait for each other in different calls.
            WaitTooLong: The wait has exceeded the timeout.
        """
        self.check_failures()
        waited, limits = self.clock.now() - self._since, Limits.of(self.timeout)
        try:
            for wait_policy in self._enclosing():
                wait_policy.board.raise_failures()
            may_deadlock = waited > self.board.deadlocked_after and self._collective
            if may_deadlock and (calls := self.board.find_deadlock()):
                cause = _mismatch_text(calls) + self.board.describe_lost_messages()
                # The entry in the status board makes other ranks report the same cause of the
                # failure.
                self.board.fail(f"Mismatch: {cause}")
                raise Mismatch(cause)
            if waited > limits.look and not self._snapshots_requested:
                self._snapshots_requested = True
                self.board.request_snapshots()
            if waited > limits.wait:
                raise WaitTooLong(
                    f"rank {self.rank} has waited {waited:.0f} s in {self.call_name}: "
                    f"{self.board.describe_ranks(self.call_name)}"
                    f"{self.board.describe_lost_messages()}; "
                    f"to allow a longer wait, give timeout={2 * self.timeout:.0f}"
                )
        except LabkitError as error:
            for wait_policy in self._enclosing():
                wait_policy.first_error = error
            raise

    def check_failures(self) -> None:
        """Raise `RankDied` if a rank is dead, and interrupt the waits of all other ranks."""
        if not self._outlives:
            return
        policies = list(self._enclosing())
        if not any(is_broken(wait_policy.comm) for wait_policy in policies):
            return
        for wait_policy in policies:
            wait_policy.comm.Revoke()
        outermost = policies[-1]
        error = outermost.board.mark_dead(dead_ranks(outermost.comm, self.clock))
        for wait_policy in policies:
            wait_policy.first_error = error
        raise error

    def _enclosing(self) -> Iterator[WaitPolicy]:
        """Yield this wait policy, then the policies of all larger groups that contain its ranks."""
        policy: WaitPolicy | None = self
        while policy is not None:
            yield policy
            policy = policy._outer


def _mismatch_text(calls: dict[int, str]) -> str:
    names = "; ".join(f"rank {rank} waits in {name}" for rank, name in calls.items())
    return f"ranks wait for each other in different calls: {names}"
