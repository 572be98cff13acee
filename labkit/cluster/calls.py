"""One call on several ranks: sent to all at once, watched, and ended as one."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar, TypeVarTuple

from labkit.cluster.code_objects import dumps
from labkit.cluster.lease import Turn
from labkit.common import imports
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.timeouts import Limits
from labkit.communicator import HostSilent, RankDied, RankFailed, WaitTooLong
from labkit.communicator.status_table import ENDED
from labkit.network import Network
from labkit.records.endings import End, out_of_memory
from labkit.worker.source_bundle import pack

if TYPE_CHECKING:
    import ipyparallel

    from labkit.cluster.launch import State
    from labkit.cluster.start import Start

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LOOK_EVERY = 0.05  # seconds
_LATE = re.compile(r": rank (\d+) is in ")  # in the words of a WaitTooLong
GONE = 0.3  # seconds that they get where it is the host of some that is gone
# In the words of a RankDied.
_DIED = re.compile(rf"rank ([0-9, ]+) failed: {ENDED}")
_GONE = re.compile(r"host \S+ with rank (\d+)")  # in the words of a HostSilent
ANSWER = 1.0  # seconds in which a host that is there has said so
ENGINE_GONE = "EngineError"  # ipyparallel's name for it; it comes a minute after the death


class Ranks(Protocol):
    """What calls need of a cluster."""

    name: str
    folder: Path
    limit: float
    how: Start

    @property
    def connected(self) -> bool:
        """Whether this process holds it."""

    @property
    def client(self) -> ipyparallel.Client:
        """The connected client."""

    @property
    def engines(self) -> list[int]:
        """Engine ids in rank order."""

    def state(self) -> State:
        """What the keeper says."""

    def rebuild(self, stuck: list[int]) -> None:
        """End the engines, of which some are stuck; they start again at the next use."""

    def how_ended(self) -> End | None:
        """How the engines have ended; None while they are up."""


class RankError(LabkitError):
    """A rank failed.

    Attributes:
        rank: the one that failed first; None when no rank is to blame.
        remote: its traceback.
        signal: that ended it, or another part of the cluster; "" where none did.
    """

    def __init__(self, message: str, rank: int | None, remote: str = "", signal: str = "") -> None:
        super().__init__(message)
        self.rank, self.remote, self.signal = rank, remote, signal


class Refused(RankError, InvalidInput):
    """Ranks refused what they were given: what only they can know, such as the layers of a model.

    The message is theirs, the same as if it had been refused before they started.
    """


class Failure(NamedTuple):
    """How a rank failed: the error's name, what it says, and its traceback."""

    name: str
    value: str
    traceback: str


def is_gone(failure: Failure) -> bool:
    """Whether it tells of a host that is gone: by who noticed, or by who repeats it."""
    return HostSilent.__name__ in (failure.name, *failure.value.split(": ")[1:2])


class CallRequest:
    """What ranks have been asked, all at once, and have not all answered yet.

    Args:
        cluster: whose ranks.
        calls: what was sent, in rank order.
    """

    def __init__(self, cluster: Ranks, calls: Sequence[ipyparallel.AsyncResult]) -> None:
        self._cluster, self._calls = cluster, calls
        self._keeper = cluster.state()["pid"]

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        dead = self.dead()
        return [n for n, call in enumerate(self._calls) if not (call.ready() or n in dead)]

    def dead(self) -> set[int]:
        """Ranks whose processes have ended, where others outlive them."""
        if not self._cluster.how.fault_tolerant:
            return set()
        return set(self._cluster.state()["dead"]) & set(range(len(self._calls)))

    def wait(self, seconds: float) -> None:
        """Wait for all ranks, but no longer than this, nor for engines that have ended."""
        for _ in self.waits(seconds):
            pass

    def waits(self, seconds: float) -> Iterator[None]:
        """The same, yielding every few milliseconds."""
        end = time.monotonic() + seconds
        while self.running() and self.why_ended() is None and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
            yield

    @property
    def grace(self) -> float:
        """Seconds that ranks get to end after one has failed, or was interrupted."""
        return Limits.of(self._cluster.limit).grace

    def first_failure(self) -> int | None:
        """The rank that failed first; those that only say that another did stand behind it.

        A rank that is dead has not failed: those that outlive it say what follows.
        """
        failed = [
            rank
            for rank, call in enumerate(self._calls)
            if _has_failed(call) and not self._is_lost(rank)
        ]
        return min(failed, key=self._order, default=None)

    def _is_lost(self, rank: int) -> bool:
        """Return whether a fault-tolerant cluster's client reports this engine as lost."""
        lost = _has_failed(self._calls[rank]) and self.failure(rank).name == ENGINE_GONE
        return lost and self._cluster.how.fault_tolerant

    def failure(self, rank: int) -> Failure:
        """How this rank failed."""
        error = self._calls[rank].exception()
        name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        return Failure(name, str(value), str(getattr(error, "traceback", "")))

    def why_ended(self) -> End | None:
        """How the engines have ended; None while they are up."""
        how = self._cluster.how_ended()
        if how is None and not self._has_engines():
            return End("another process, thread or cell has started them anew")
        return how

    def _has_engines(self) -> bool:
        """Whether the cluster's engines are those that were asked."""
        return self._cluster.state()["pid"] == self._keeper

    def _order(self, rank: int) -> tuple[bool, str]:
        # As text: what an engine that is gone never sent was never received.
        # Echoes last: a rank that only says that another one failed is not the cause.
        is_echo = self.failure(rank).name in (RankFailed.__name__, RankDied.__name__)
        return is_echo, str(self._calls[rank].metadata["received"])


class Calls(CallRequest, Generic[T]):
    """A function that runs on the first ranks of a cluster, as `function(communicator, …)`.

    Args:
        cluster: whose ranks.
        ranks: how many of them.
        function: travels by value, so it may come from a notebook's cell.
        arguments: after the communicator.
        network: a network that the communicator emulates.
        spares: how many more wait to take the place of one that dies.
        extra: further entries of the task; see `labkit.worker.work.main`.
    """

    def __init__(
        self,
        cluster: Ranks,
        ranks: int,
        function: Callable[..., T],
        arguments: tuple[*Ts],
        network: str | Network | None = None,
        spares: int = 0,
        **extra: JSON,
    ) -> None:
        import cloudpickle

        from labkit.worker.work import main

        # Pickled here and once: ipyparallel would do so for each engine, and by reference to
        # modules that an engine may not have.
        task = cloudpickle.dumps(
            {
                # A pickle in a pickle: a rank unpacks the call after it has joined the others, so
                # that its errors are told like any other.
                "call": dumps((function, arguments)),
                "ranks": list(range(ranks + spares)),
                "spares": spares,
                "limit": cluster.limit,
                "network": network,
                "folder": os.getcwd(),
                "modules": (modules := imports.folder()),
                "luggage": None if cluster.how.is_local else pack(modules),
                # Engines were started by whoever came first, with that process's environment.
                "environment": {k: v for k, v in os.environ.items() if k == "LABKIT_DATA"},
                **extra,
            }
        )
        # Those who share a cluster take turns: a call has all its ranks or none.
        self._turn, self._closed = Turn(cluster.folder), False
        self._silent: set[int] = set()  # ranks that wait for the dead, and for ever
        self._ended_at = math.inf  # moment at which the first surviving rank ended
        try:
            if dead := cluster.state()["dead"]:  # while nobody called
                cluster.rebuild(dead)
            client = cluster.client  # now: the call before may have started them anew
            engines = cluster.state()["engines"][: ranks + spares]
            super().__init__(cluster, [client[e].apply_async(main, task) for e in engines])
            self._abort = partial(client.abort, self._calls[0], engines[0], block=False)
        except BaseException:
            self._turn.release()
            raise

    def watch(self) -> Iterator[None]:
        """Yield every few milliseconds until all ranks have ended, or one has failed.

        Raises:
            RankError: a rank failed, or the engines ended.
            Refused: a rank raised InvalidInput.
        """
        while self.running():
            time.sleep(LOOK_EVERY)
            yield
            if (failed := self.first_failure()) is not None:
                # Others notice by themselves, and their tracebacks tell more than that they were
                # killed. From a host that is gone nothing comes.
                # Yielding: who has given up does not wait longer than he said.
                yield from self.waits(GONE if is_gone(self.failure(failed)) else self.grace)
                break
            if self.why_ended() is not None:
                break
            self._leave_silent()
        self._raise_first_failure()

    def _leave_silent(self) -> None:
        """Give up ranks that still run long after the surviving ranks have ended.

        A death in the last exchange may reach only some: these wait for those that have ended.
        """
        if self._ended_at == math.inf and any(map(_has_succeeded, self._calls)) and self.dead():
            self._ended_at = time.monotonic()
        if time.monotonic() > self._ended_at + self._cluster.limit:
            self._silent |= set(self.running())

    def dead(self) -> set[int]:
        """Also by what those say that have outlived them, wherever these are."""
        found = super().dead() | self._silent
        for rank, call in enumerate(self._calls) if self._cluster.how.fault_tolerant else []:
            if _has_succeeded(call):
                found |= set(call.get()[1])
            elif self._is_lost(rank):
                found.add(rank)
            elif call.ready() and (told := _DIED.search(str(call.exception()))):
                found |= {int(number) for number in told[1].split(", ")}
        return found

    def results(self) -> list[T] | None:
        """What the ranks returned, in rank order; None unless all did."""
        found = self.of_the_living()
        return list(found.values()) if found and len(found) == len(self._calls) else None

    def of_the_living(self) -> dict[int, T] | None:
        """What each rank returned that has not died; None unless all those did."""
        dead = self.dead()
        living = [
            call for n, call in enumerate(self._calls) if n not in dead or _has_succeeded(call)
        ]
        if not all(map(_has_succeeded, living)):
            return None
        told = [call.get() for call in living]
        found = {number: result for result, _, number in told if number is not None}
        return dict(sorted(found.items()))

    def told(self, all_of_it: bool = False) -> Iterator[tuple[int, str]]:
        """What ranks have published since this was asked last, see `labkit.worker.remote_stream`.

        Args:
            all_of_it: wait for what is still under way from ranks that have ended.
        """
        dead = self.dead()
        for rank, call in enumerate(self._calls):
            if all_of_it and rank not in dead:
                call.wait_for_output(self.grace)
            told = call.metadata["data"]  # which the client's own thread adds to
            yield from ((rank, told.pop(name)) for name in list(told))

    def ask_to_stop(self) -> None:
        """Let the first rank hear of it, which has begun and does not see the run's folder."""
        self._abort()

    def outputs(self) -> list[str]:
        """What each rank printed, and its traceback if it failed."""
        ends = [
            self.failure(rank).traceback if _has_failed(call) else ""
            for rank, call in enumerate(self._calls)
        ]
        return [
            "".join(part or "" for part in (call.stdout, call.stderr, end))
            for call, end in zip(self._calls, ends, strict=True)
        ]

    def close(self) -> None:
        """Let others have their turn; engines with a rank that has not ended are started again."""
        if self._closed:
            return
        self._closed = True
        try:
            if (stuck := [*self.running(), *self.dead()]) and self._has_engines():
                self._cluster.rebuild(stuck)
        finally:
            self._turn.release()

    def _why_ended(self, failed: int | None) -> End | None:
        """How the engines have ended; the keeper hears of it after the controller."""
        end = time.monotonic() + self.grace
        all_lost = all(self._is_lost(rank) for rank in range(len(self._calls)))
        while (how := self.why_ended()) is None and time.monotonic() < end:
            if not all_lost and (failed is None or self.failure(failed).name != ENGINE_GONE):
                return None
            time.sleep(LOOK_EVERY)
        return how

    def _raise_first_failure(self) -> None:
        rank = self.first_failure()
        # Before any rank's own failure: engines that end take all answers with them.
        if (how := self._why_ended(rank)) is not None:
            raise RankError(f"the engines ended: {how.message}", how.rank, signal=how.signal)
        if rank is None:
            return
        name, value, remote = self.failure(rank)
        stuck = ", ".join(map(str, self.running()))
        note = f"; rank {stuck} did not end: the engines start anew" if stuck else ""
        # By name: an exception of an engine comes as text.
        if name == InvalidInput.__name__:
            raise Refused(f"{' '.join(value.split())}{note}", rank, remote)
        if name == WaitTooLong.__name__ and (late := _LATE.search(value)):
            # The one that others have waited for is to blame, not the one that waited.
            rank = int(late[1])
            raise RankError(f"rank {rank} did not come: {name}: {_gist(value)}{note}", rank, remote)
        if name == HostSilent.__name__ and (gone := _GONE.search(value)):
            stands = self._stands(int(gone[1]))
            raise RankError(f"{_gist(value)}{stands}{note}", int(gone[1]), remote)
        if name == RankDied.__name__ and (died := _DIED.search(value)):
            raise RankError(
                f"{_gist(value)}, and this call does not go on without it; the engines start anew",
                int(died[1].split(",")[0]),
            )
        told = f"{_gist(value)}{out_of_memory(f'{name}: {value}')}"
        raise RankError(f"rank {rank} failed: {name}: {told}{note}", rank, remote)

    def _stands(self, rank: int) -> str:
        """Whether a rank that is not heard is there all the same, by who is beside its process."""
        # The nanny of an engine on another host is a process of its own, and tries signal 0 on it.
        engine, client = self._cluster.engines[rank], self._cluster.client
        future = client.send_signal(0, engine, block=False)
        end = time.monotonic() + ANSWER
        while not future.done() and time.monotonic() < end:
            time.sleep(LOOK_EVERY)
        if not future.done() or future.result()[0]["content"]["status"] != "ok":
            return ""
        return (
            f"; but its host answers, and the process of rank {rank} is there: it stands still "
            "(stopped by a signal, or in code that lets no other thread run)"
        )


def _has_failed(call: ipyparallel.AsyncResult) -> bool:
    return bool(call.ready() and not call.successful())


def _has_succeeded(call: ipyparallel.AsyncResult) -> bool:
    return bool(call.ready() and call.successful())


def _gist(message: str) -> str:
    """One line: TensorFlow puts what went wrong at the end of a page of traceback."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if line and not line.startswith("[[")]
    return told[-1] if told else message
