"""How a rank waits: never silently, and without taking the core of who computes."""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator.clock import Clock
from labkit.communicator.status_board import Mismatch, StatusBoard, WaitTooLong
from labkit.communicator.traffic import Traffic
from labkit.communicator.ulfm import FailureGuard, gone, is_broken, outlives

if TYPE_CHECKING:
    from mpi4py import MPI

NAP, LONGEST_NAP = 20e-6, 1e-3  # seconds
SHARE = 0.01  # of what has been waited: a nap of a long wait
LATE = 300e-6  # seconds by which a sleep may last too long
SPINS = 250  # polls before the first nap; about 0.3 ms
_CHECK_EVERY = 16  # polls between two looks at the board and the clock
_TAGS = 1 << 27  # as many tags of collectives, above those of single messages


class WaitPolicy:
    """Waits of one rank, each in a call that has a name; what makes waiting pointless is raised.

    The name of a call says all that ranks must agree on: what it is for, and which operation on
    what. Its code travels with the handshake that the call has anyway, or is the tag of its
    messages, so that ranks in different calls never take each other's data for their own.

    Args:
        comm: the mpi4py communicator of the ranks that wait for each other.
        board: where ranks tell each other how they are.
        traffic: the meter of seconds waited.
        clock: by which it waits.
        limit: seconds after which a wait raises `WaitTooLong`.
        outer: of the ranks of which these are a part; a failure may be told to them alone.

    Attributes:
        comm, board, traffic, clock: as given, for what this rank does besides waiting.
        on_one_host: whether all ranks share memory.
        minding: a context in which MPI may say that a rank is gone: it raises `RankDied`.
        place, code: the name of the call that this rank is in, and 32 bits of it.
        trouble: the first error that a wait has raised.
        polite: sleep between polls instead of spinning.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        board: StatusBoard,
        traffic: Traffic,
        clock: Clock,
        limit: float,
        outer: WaitPolicy | None = None,
    ) -> None:
        self.board, self.traffic, self.clock, self.limit = board, traffic, clock, limit
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.on_one_host = len(board.ranks) == self.size
        self.comm, self._outer = comm, outer
        self.trouble: LabkitError | None = None
        self.polite = False
        self.place, self.code = "", 0
        self._collective, self._since, self._asked = False, 0.0, False
        self.minding, self._outlives = FailureGuard(self.check_failures, clock), outlives()

    def enter(self, place: str, collective: bool = True, told: str = "") -> None:
        """Name the call whose waits come next.

        Args:
            place: the same on all ranks that are in it.
            collective: it waits for all others.
            told: what else is told of this rank's call; ranks may differ in it.
        """
        self.place, self._collective = place + told, collective
        self.code = zlib.crc32(place.encode())

    def count(self, nbytes: int, out: int) -> None:
        """Meter a message, or what counts as one.

        Args:
            nbytes: that leave this rank.
            out: how many of them leave its host, where ranks are on several.
        """
        self.traffic.messages += 1
        self.traffic.wire_bytes += nbytes
        self.traffic.link_bytes += 0 if self.on_one_host else out

    def count_to(self, peer: int, nbytes: int) -> None:
        """Meter a message to a rank."""
        self.count(nbytes, 0 if peer in self.board.ranks else nbytes)

    def tally(self, kind: str, peer: int) -> None:
        """Count a message "sent" to a rank, or "got" from it; those of parts are not counted."""
        if self._outer is None:
            self.board.tally(kind, peer)

    def inside_host(self) -> WaitPolicy:
        """That of this host's ranks among themselves, by their order (collective)."""
        from mpi4py import MPI

        if self.on_one_host:
            return self
        host = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        assert isinstance(host, MPI.Intracomm)  # as all parts of one are
        return WaitPolicy(host, self.board, self.traffic, self.clock, self.limit, self)

    def join(self, outer: WaitPolicy) -> None:
        """Be in the same call as the ranks around these, and wait as they do."""
        if outer is not self:
            self.place, self.code = outer.place, outer.code
            self._collective, self.polite = outer._collective, outer.polite

    @property
    def tag(self) -> int:
        """Of messages of this call, which no other call's can be taken for."""
        return _TAGS + self.code % _TAGS

    def begin(self, number: int = 0) -> float:
        """A wait begins now, of a schedule in the round of this number; the time."""
        self.board.enter(self.place, self._collective, number)
        self._since, self._asked = self.clock.now(), False
        return self._since

    def complete(self, requests: list[MPI.Request], number: int = 0) -> None:
        """Wait for MPI requests, of a round if it has a number, looking around now and then."""
        from mpi4py import MPI

        start = self.begin(number)
        polls = 0
        with self.minding:
            while not MPI.Request.Testall(requests):
                self.pause(polls)
                polls += 1
        self.traffic.wait_seconds += self.clock.now() - start

    def meet(self, what: str = "barrier") -> None:
        """Wait until every rank has come to this call.

        Raises:
            RankFailed: a rank said that it failed, or its host is not heard any more.
            WaitTooLong: someone did not come within the limit.
            Mismatch: another rank has come to another call.
        """
        if self.size == 1:
            return
        self.enter(what)
        self.gather_here()
        self.board.enter(f"work after {what}")

    def gather_here(self, value: float = 0.0) -> np.ndarray:
        """A barrier in which ranks tell each other which call they are in, and a number.

        Returns:
            everybody's number, by rank.
        """
        told = np.zeros((self.size, 2))
        with self.minding:
            request = self.comm.Iallgather(np.array([self.code, value], np.float64), told)
        self.complete([request])
        if np.any(told[:, 0] != self.code):
            self.disagree()
        self.look_around()  # who failed after coming here goes no further with us
        return told[:, 1]

    def call(self, name: str, *given: Any) -> None:
        """A collective of the library to which all have come, such as "Bcast".

        Over hosts a link may go down in its midst: there it is looked after. None of it is a wait.
        So it is where ranks may die: a blocking Allgatherv of Open MPI 5 has returned, without an
        error, zeros in the place of what had not come.
        """
        if self.on_one_host and not self._outlives:
            with self.minding:
                getattr(self.comm, name)(*given)
            return
        waited = self.traffic.wait_seconds
        with self.minding:
            self.complete([getattr(self.comm, f"I{name.lower()}")(*given)])
        self.traffic.wait_seconds = waited
        self.board.enter(f"work after {self.place}")  # else a rank that computes seems to wait

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, in rank order (pickled), in the call that was entered."""
        ndarray = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.gather_here(len(ndarray)).astype(int)
        whole = np.empty(lengths.sum(), np.uint8)
        self.call("Allgatherv", ndarray, (whole, lengths))
        self.board.enter(f"work after {self.place}")
        return [pickle.loads(part.data) for part in np.split(whole, np.cumsum(lengths)[:-1])]

    def share(self, value: Any, root: int) -> Any:
        """Likewise, the root's object, on every rank."""
        ndarray = np.frombuffer(pickle.dumps(value if self.rank == root else None), np.uint8).copy()
        length = int(self.gather_here(len(ndarray))[root])
        whole = ndarray if self.rank == root else np.empty(length, np.uint8)
        self.call("Bcast", whole, root)
        self.board.enter(f"work after {self.place}")
        return pickle.loads(whole.data)

    def disagree(self, told: str = "") -> NoReturn:
        """Tell every rank which calls the ranks are in (collective: all know that they differ).

        Args:
            told: what else to tell of this rank's call.

        Raises:
            Mismatch: always.
        """
        with self.minding:
            places = self.comm.allgather(self.place + told)
        self.trouble = Mismatch(_different(dict(enumerate(places))))
        raise self.trouble

    def sleep_until(self, moment: float) -> None:
        """Sleep until a moment of the clock: a message is on its way, nobody is late."""
        self.clock.sleep(max(0.0, moment - self.clock.now() - LATE))
        self.clock.sleep_until(moment, exact=not self.polite)  # which may have changed meanwhile

    def pause(self, polls: int) -> None:
        """Between two polls: let others have the core, and look around now and then.

        A short wait is a loop. A longer one naps: a loop would slow down the rank that it waits
        for, where two cores are threads of one. The longer the wait, the longer the nap, so that
        many ranks that wait for one leave it a core; it is 1 % of the wait, or the shortest one.
        """
        if polls < SPINS and not self.polite:
            os.sched_yield()
            return
        waited = self.clock.now() - self._since
        self.clock.sleep(min(max(NAP, SHARE * waited), LONGEST_NAP))
        if polls % _CHECK_EVERY == 0:
            self.look_around()

    def look_around(self) -> None:
        """Raise if waiting has become pointless, and remember why.

        Raises:
            RankFailed, Mismatch, WaitTooLong: see `Communicator`.
        """
        self.check_failures()
        waited, limits = self.clock.now() - self._since, Limits.of(self.limit)
        try:
            for wait_policy in self._whole():
                wait_policy.board.check()
            around = waited > self.board.deadlocked_after and self._collective
            if around and (calls := self.board.deadlock()):
                told = _different(calls) + self.board.lost()
                self.board.fail(f"Mismatch: {told}")  # whoever looks later is told the same
                raise Mismatch(told)
            if waited > limits.look and not self._asked:
                self._asked = True
                self.board.ask()
            if waited > limits.wait:
                raise WaitTooLong(
                    f"rank {self.rank} has waited {waited:.0f} s in {self.place}: "
                    f"{self.board.everyone(self.place)}{self.board.lost()}; "
                    f"a longer wait is allowed by limit={2 * self.limit:.0f}"
                )
        except LabkitError as error:
            for wait_policy in self._whole():
                wait_policy.trouble = error
            raise

    def check_failures(self) -> None:
        """Raise `RankDied` if a rank is gone, and wake those that wait for others than that one."""
        if not self._outlives:
            return
        whole = list(self._whole())
        if not any(is_broken(wait_policy.comm) for wait_policy in whole):
            return
        for wait_policy in whole:
            wait_policy.comm.Revoke()
        outermost = whole[-1]
        error = outermost.board.mark_dead(gone(outermost.comm, self.clock))
        for wait_policy in whole:
            wait_policy.trouble = error
        raise error

    def _whole(self) -> Iterator[WaitPolicy]:
        """This one, and those of the ranks around it."""
        at: WaitPolicy | None = self
        while at is not None:
            yield at
            at = at._outer


def _different(calls: dict[int, str]) -> str:
    told = "; ".join(f"rank {rank} waits in {place}" for rank, place in calls.items())
    return f"ranks wait for each other in different calls: {told}"
