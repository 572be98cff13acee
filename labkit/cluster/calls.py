"""A function call on several ranks at once, which labkit monitors and ends on all ranks."""

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
from labkit.common import imports, keras_settings
from labkit.common.canonical_json import JSON
from labkit.common.errors import InvalidInput, LabkitError, gist
from labkit.common.timeouts import Limits
from labkit.communicator import HostSilent, RankDied, RankFailed, WaitTooLong
from labkit.communicator.status_table import ENDED
from labkit.network import Network
from labkit.records import provenance
from labkit.records.endings import End, out_of_memory_hint
from labkit.worker.source_bundle import pack

if TYPE_CHECKING:
    import ipyparallel

    from labkit.cluster.launch import ClusterState
    from labkit.cluster.start import Start

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

POLL_INTERVAL = 0.05  # seconds
# The expression `_LATE` matches messages of the error WaitTooLong.
_LATE = re.compile(r": rank (\d+) is in ")
# After a host has failed, labkit waits HOST_LOST_GRACE seconds for other ranks.
HOST_LOST_GRACE = 0.3
# The expression `_DIED` matches messages of the error RankDied.
_DIED = re.compile(rf"rank ([0-9, ]+) failed: {ENDED}")
# The expression `_LOST_HOST` matches messages of the error HostSilent.
_LOST_HOST = re.compile(r"host \S+ with rank (\d+)")
# ipyparallel's nanny process must report within ANSWER seconds whether its rank is alive.
ANSWER = 1.0
# ipyparallel raises the error EngineError one minute after the death of an engine.
ENGINE_GONE = "EngineError"


class ClusterProtocol(Protocol):
    """The part of a cluster's interface that `labkit.cluster.calls` needs."""

    name: str
    folder: Path
    timeout: float
    how: Start

    @property
    def connected(self) -> bool:
        """Whether this object is connected to the engines."""

    @property
    def client(self) -> ipyparallel.Client:
        """The ipyparallel client that is connected to the engines."""

    @property
    def engines(self) -> list[int]:
        """Ids of the engines in rank order."""

    def state(self) -> ClusterState:
        """Return the cluster state that the cluster's supervising process has last written."""

    def rebuild(self, stuck: list[int]) -> None:
        """End all engines, because the ranks in `stuck` hang; engines restart at the next use."""

    def how_ended(self) -> End | None:
        """Return how the engines have ended, or None while they are running."""


class RankError(LabkitError):
    """Raised when a rank failed.

    Attributes:
        rank: The rank that failed first. The value None means that no single rank caused the error.
        remote: Traceback of the failed rank, as text.
        signal: Signal that ended the rank or another process of the cluster; "" if no signal did.
    """

    def __init__(self, message: str, rank: int | None, remote: str = "", signal: str = "") -> None:
        super().__init__(message)
        self.rank, self.remote, self.signal = rank, remote, signal


class Refused(RankError, InvalidInput):
    """Raised when ranks reject input that only they can check, such as the layers of a model.

    The error repeats the message of the ranks. The error reads like an error from before the start
    of the ranks.
    """


class Failure(NamedTuple):
    """A failure of a rank: name of the exception, its message, and the traceback."""

    name: str
    value: str
    traceback: str


def reports_lost_host(failure: Failure) -> bool:
    """Return whether a failure is HostSilent, or quotes the HostSilent of another rank."""
    return HostSilent.__name__ in (failure.name, *failure.value.split(": ")[1:2])


class PendingCalls:
    """Calls that were sent to all ranks at once; some of the calls may still be running.

    Args:
        cluster: Cluster of the ranks.
        calls: Pending results of the calls, in rank order.
    """

    def __init__(self, cluster: ClusterProtocol, calls: Sequence[ipyparallel.AsyncResult]) -> None:
        self._cluster, self._calls = cluster, calls
        self._keeper = cluster.state()["pid"]

    def running(self) -> list[int]:
        """Return the ranks whose call has not ended."""
        dead = self.dead()
        return [n for n, call in enumerate(self._calls) if not (call.ready() or n in dead)]

    def dead(self) -> set[int]:
        """In a fault-tolerant cluster, return the ranks whose processes have died."""
        if not self._cluster.how.fault_tolerant:
            return set()
        return set(self._cluster.state()["dead"]) & set(range(len(self._calls)))

    def wait(self, seconds: float) -> None:
        """Wait until all calls or the engines have ended, for at most `seconds`."""
        for _ in self.wait_polling(seconds):
            pass

    def wait_polling(self, seconds: float) -> Iterator[None]:
        """Wait as the method `wait` does, but yield every few milliseconds."""
        end = time.monotonic() + seconds
        while self.running() and self.why_ended() is None and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
            yield

    @property
    def grace(self) -> float:
        """Time limit in seconds for ranks to return after a failure or an interrupt."""
        return Limits.of(self._cluster.timeout).grace

    def first_failure(self) -> int | None:
        """Return the rank that failed first, or None without a failure.

        In a fault-tolerant cluster, a dead rank does not count as failed. The surviving ranks may
        continue without the dead rank.
        """
        failed = [
            rank
            for rank, call in enumerate(self._calls)
            if _has_failed(call) and not self._is_lost(rank)
        ]
        return min(failed, key=self._failure_order, default=None)

    def _is_lost(self, rank: int) -> bool:
        """Return whether a fault-tolerant cluster has lost the engine of this rank."""
        lost = _has_failed(self._calls[rank]) and self.failure(rank).name == ENGINE_GONE
        return lost and self._cluster.how.fault_tolerant

    def failure(self, rank: int) -> Failure:
        """Return how this rank failed."""
        error = self._calls[rank].exception()
        name, value = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", error)
        return Failure(name, str(value), str(getattr(error, "traceback", "")))

    def why_ended(self) -> End | None:
        """Return how the engines have ended, or None while they are running."""
        how = self._cluster.how_ended()
        if how is None and not self._has_engines():
            return End("another process, thread or cell has restarted the engines")
        return how

    def _has_engines(self) -> bool:
        """Return whether the engines that received the calls are still the cluster's engines."""
        return self._cluster.state()["pid"] == self._keeper

    def _failure_order(self, rank: int) -> tuple[bool, str]:
        # The code compares receive times as text. The result of a lost engine has None instead of a
        # time. In the order of failures, a rank that only reports another rank's failure comes
        # last.
        is_echo = self.failure(rank).name in (RankFailed.__name__, RankDied.__name__)
        return is_echo, str(self._calls[rank].metadata["received"])


class Calls(PendingCalls, Generic[T]):
    """A call of `function(communicator, …)` on the first `ranks` ranks of a cluster.

    Args:
        cluster: Cluster of the ranks.
        ranks: Number of ranks that execute the call.
        function: Function to call; it is pickled by value, so a notebook cell may define it.
        arguments: Arguments that the function receives after the communicator.
        network: Network that the communicator emulates.
        spares: Number of additional ranks, each of which can replace a dead rank.
        extra: Further entries of the task that the ranks receive; see `labkit.worker.work.main`.
    """

    def __init__(
        self,
        cluster: ClusterProtocol,
        ranks: int,
        function: Callable[..., T],
        arguments: tuple[*Ts],
        network: str | Network | None = None,
        spares: int = 0,
        **extra: JSON,
    ) -> None:
        import cloudpickle

        from labkit.worker.work import main

        # Instead of ipyparallel, labkit itself pickles the task. The library ipyparallel would
        # pickle the task again for each engine. A pickle by ipyparallel would refer to modules that
        # engines lack.
        task = cloudpickle.dumps(
            {
                # The function is a separate pickle inside the pickled task. A rank unpickles the
                # function after it has joined the other ranks. A failure to unpickle the function
                # counts as an error of the function.
                "call": dumps((function, arguments)),
                "ranks": list(range(ranks + spares)),
                "spares": spares,
                "limit": cluster.timeout,
                "network": network,
                "folder": os.getcwd(),
                "modules": (modules := imports.extra_folders()),
                "luggage": None if cluster.how.is_local else pack(modules),
                # The task contains the variable LABKIT_DATA, because a process with a different
                # environment may have started the engines.
                "environment": {k: v for k, v in os.environ.items() if k == "LABKIT_DATA"}
                | keras_settings.carried(),
                **extra,
            }
        )
        # Processes that share a cluster use its ranks one after another. Each call needs all its
        # ranks at the same time.
        self._turn, self._closed = Turn(cluster.folder), False
        # The set `_silent` contains ranks that wait forever for dead ranks.
        self._silent: set[int] = set()
        # The attribute `_ended_at` is the time at which the first surviving rank returned.
        self._ended_at = math.inf
        try:
            if dead := cluster.state()["dead"]:  # Ranks may have died between two calls.
                cluster.rebuild(dead)
            # The engines may restart while this process waits for free ranks. The property `client`
            # is therefore read after the wait.
            client = cluster.client
            engines = cluster.state()["engines"][: ranks + spares]
            super().__init__(cluster, [client[e].apply_async(main, task) for e in engines])
            self._abort = partial(client.abort, self._calls[0], engines[0], block=False)
        except BaseException:
            self._turn.release()
            raise

    def watch(self) -> Iterator[None]:
        """Yield every few milliseconds until all ranks have returned or a rank has failed.

        Raises:
            RankError: A rank failed, or the engines ended.
            Refused: A rank raised InvalidInput.
        """
        while self.running():
            time.sleep(POLL_INTERVAL)
            yield
            if (failed := self.first_failure()) is not None:
                # After a rank's call has failed, labkit waits for the other ranks. Tracebacks from
                # the other ranks help to explain the failure. A lost host sends no traceback, so
                # labkit waits less long for the other ranks. The generator `wait_polling` yields
                # control repeatedly, so that a user can still stop the run.
                yield from self.wait_polling(
                    HOST_LOST_GRACE if reports_lost_host(self.failure(failed)) else self.grace
                )
                break
            if self.why_ended() is not None:
                break
            self._leave_silent()
        self._raise_first_failure()

    def _leave_silent(self) -> None:
        """Treat ranks as dead if they still run long after another rank has returned.

        If a rank dies in the last exchange, other ranks may not notice. A rank that does not notice
        the death would wait forever.
        """
        if self._ended_at == math.inf and any(map(_has_succeeded, self._calls)) and self.dead():
            self._ended_at = time.monotonic()
        if time.monotonic() > self._ended_at + self._cluster.timeout:
            self._silent |= set(self.running())

    def dead(self) -> set[int]:
        """Return the dead ranks, also ranks whose death only other ranks report."""
        ranks = super().dead() | self._silent
        for rank, call in enumerate(self._calls) if self._cluster.how.fault_tolerant else []:
            if _has_succeeded(call):
                ranks |= set(call.get()[1])
            elif self._is_lost(rank):
                ranks.add(rank)
            elif call.ready() and (match := _DIED.search(str(call.exception()))):
                ranks |= {int(number) for number in match[1].split(", ")}
        return ranks

    def results(self) -> list[T] | None:
        """Return the results in rank order, or None if a rank has not returned a result."""
        results = self.survivor_results()
        return list(results.values()) if results and len(results) == len(self._calls) else None

    def survivor_results(self) -> dict[int, T] | None:
        """Return a dictionary with the result of each rank; None if a living rank has no result."""
        dead = self.dead()
        living = [
            call for n, call in enumerate(self._calls) if n not in dead or _has_succeeded(call)
        ]
        if not all(map(_has_succeeded, living)):
            return None
        replies = [call.get() for call in living]
        results = {number: result for result, _, number, _ in replies if number is not None}
        for *_, inputs in replies:
            if inputs is not None:
                provenance.add(inputs)
        return dict(sorted(results.items()))

    def messages(self, wait: bool = False) -> Iterator[tuple[int, str]]:
        """Yield new messages of the ranks, as `labkit.worker.work` sends them.

        Args:
            wait: Whether to wait for messages that are still on the way. Messages may arrive after
                the end of the rank that sent them.
        """
        dead = self.dead()
        for rank, call in enumerate(self._calls):
            if wait and rank not in dead:
                call.wait_for_output(self.grace)
            # The loop iterates over a copy, because the thread of ipyparallel's client adds
            # messages to the dictionary.
            published = call.metadata["data"]
            yield from ((rank, published.pop(name)) for name in list(published))

    def request_stop(self) -> None:
        """Send a stop request to rank 0, for its host may have no access to the run's folder."""
        self._abort()

    def outputs(self) -> list[str]:
        """Return the output of each rank, followed by the traceback if the rank failed."""
        ends = [
            self.failure(rank).traceback if _has_failed(call) else ""
            for rank, call in enumerate(self._calls)
        ]
        return [
            "".join(part or "" for part in (call.stdout, call.stderr, end))
            for call, end in zip(self._calls, ends, strict=True)
        ]

    def close(self) -> None:
        """Release the cluster for other calls; if a rank has not returned, restart the engines."""
        if self._closed:
            return
        self._closed = True
        try:
            if (stuck := [*self.running(), *self.dead()]) and self._has_engines():
                self._cluster.rebuild(stuck)
        finally:
            self._turn.release()

    def _why_ended(self, failed: int | None) -> End | None:
        """Return how the engines have ended, or None; wait for a late report of their end."""
        end = time.monotonic() + self.grace
        all_lost = all(self._is_lost(rank) for rank in range(len(self._calls)))
        while (how := self.why_ended()) is None and time.monotonic() < end:
            if not all_lost and (failed is None or self.failure(failed).name != ENGINE_GONE):
                return None
            time.sleep(POLL_INTERVAL)
        return how

    def _raise_first_failure(self) -> None:
        rank = self.first_failure()
        # The end of the engines is checked first, because all calls fail when the engines end.
        if (how := self._why_ended(rank)) is not None:
            raise RankError(f"the engines ended: {how.message}", how.rank, signal=how.signal)
        if rank is None:
            return
        name, value, remote = self.failure(rank)
        stuck = ", ".join(map(str, self.running()))
        note = f"; rank {stuck} did not end the call, so the engines restart" if stuck else ""
        # Exceptions are compared by name, because exceptions of an engine arrive as text.
        if name == InvalidInput.__name__:
            raise Refused(f"{' '.join(value.split())}{note}", rank, remote)
        if name == WaitTooLong.__name__ and (late := _LATE.search(value)):
            # The error message names the late rank, not the rank that waits for it.
            rank = int(late[1])
            raise RankError(
                f"rank {rank} did not reach the call in which other ranks wait: {name}: "
                f"{gist(value)}{note}",
                rank,
                remote,
            )
        if name == HostSilent.__name__ and (lost := _LOST_HOST.search(value)):
            alive = self._still_alive(int(lost[1]))
            raise RankError(f"{gist(value)}{alive}{note}", int(lost[1]), remote)
        if name == RankDied.__name__ and (match := _DIED.search(value)):
            raise RankError(
                f"{gist(value)}, and the call cannot continue without this rank; the engines "
                "restart",
                int(match[1].split(",")[0]),
            )
        cause = f"{gist(value)}{out_of_memory_hint(f'{name}: {value}')}"
        raise RankError(f"rank {rank} failed: {name}: {cause}{note}", rank, remote)

    def _still_alive(self, rank: int) -> str:
        """Return a clause for an error message if the nanny reports a living rank, else ""."""
        # ipyparallel's nanny is a process on the engine's host, which can test the engine by signal
        # 0.
        engine, client = self._cluster.engines[rank], self._cluster.client
        future = client.send_signal(0, engine, block=False)
        end = time.monotonic() + ANSWER
        while not future.done() and time.monotonic() < end:
            time.sleep(POLL_INTERVAL)
        if not future.done() or future.result()[0]["content"]["status"] != "ok":
            return ""
        return (
            f"; but the host answers, and the process of rank {rank} is alive and blocked "
            "(stopped by a signal, or in code that holds the GIL)"
        )


def _has_failed(call: ipyparallel.AsyncResult) -> bool:
    return bool(call.ready() and not call.successful())


def _has_succeeded(call: ipyparallel.AsyncResult) -> bool:
    return bool(call.ready() and call.successful())
