"""One call on several ranks: sent to all at once, watched, and ended as one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from labkit.cluster.lease import Turn
from labkit.common.errors import InvalidInput, LabkitError
from labkit.network import Network

if TYPE_CHECKING:
    from pathlib import Path

    import ipyparallel

LOOK_EVERY = 0.05  # seconds
PATIENCE = 10.0  # seconds that the other ranks get to end after one has failed


class Ranks(Protocol):
    """What calls need of a cluster."""

    name: str
    folder: Path
    limit: float

    @property
    def connected(self) -> bool:
        """Whether this process holds it."""

    @property
    def client(self) -> ipyparallel.Client:
        """The connected client."""

    @property
    def engines(self) -> list[int]:
        """Engine ids in rank order."""

    def state(self) -> dict[str, Any]:
        """What the keeper says."""

    def restart(self) -> None:
        """End the engines; they start again at the next use."""


class RankError(LabkitError):
    """A rank failed.

    Attributes:
        rank: the one that failed first; None when the engines ended.
        remote: its traceback.
    """

    def __init__(self, message: str, rank: int | None, remote: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.remote = remote


class Refused(RankError, InvalidInput):
    """Ranks refused what they were given: what only they can know, such as the layers of a model.

    The message is theirs, the same as if it had been refused before they started.
    """


class Calls:
    """A function that runs on the first ranks of a cluster, as `function(communicator, …)`.

    Args:
        cluster: whose ranks.
        ranks: how many of them.
        function: travels by value, so it may come from a notebook's cell.
        arguments: after the communicator.
        network: a network that the communicator emulates.
        extra: further entries of the task; see `labkit.worker.work.main`.
    """

    def __init__(
        self,
        cluster: Ranks,
        ranks: int,
        function: Callable[..., Any],
        arguments: Sequence[Any] = (),
        network: str | Network | None = None,
        **extra: Any,
    ) -> None:
        import cloudpickle

        from labkit.worker.work import main

        task = cloudpickle.dumps(
            {
                "call": cloudpickle.dumps((function, tuple(arguments))),
                "ranks": list(range(ranks)),
                "limit": cluster.limit,
                "network": network,
                "folder": os.getcwd(),
                "environment": {k: v for k, v in os.environ.items() if k == "LABKIT_DATA"},
                **extra,
            }
        )
        # Those who share a cluster take turns: a call has all its ranks or none.
        self._turn = Turn(cluster.folder)
        self._cluster = cluster
        try:
            engines = cluster.engines[:ranks]  # now: the call before may have started them anew
            self._calls = [cluster.client[engine].apply_async(main, task) for engine in engines]
        except BaseException:
            self._turn.release()
            raise

    def done(self) -> bool:
        """Whether every rank has ended."""
        return all(call.ready() for call in self._calls)

    def wait(self, seconds: float) -> None:
        """Wait for all ranks, but no longer than this."""
        end = time.monotonic() + seconds
        while not self.done() and time.monotonic() < end:
            time.sleep(LOOK_EVERY)

    def watch(self) -> Iterator[None]:
        """Yield every few milliseconds until all ranks have ended, or one has failed.

        Raises:
            RankError: a rank failed, or the engines ended.
            Refused: a rank raised InvalidInput.
        """
        while not self.done():
            time.sleep(LOOK_EVERY)
            yield
            if any(call.ready() and not call.successful() for call in self._calls):
                self.wait(PATIENCE)
                break
            if self._cluster.state()["state"] != "ready":
                break
        self._raise_first_failure()

    def results(self) -> list[Any] | None:
        """What the ranks returned, in rank order; None unless all did."""
        if not all(call.ready() and call.successful() for call in self._calls):
            return None
        return [call.get() for call in self._calls]

    def outputs(self) -> list[str]:
        """What each rank printed, and its traceback if it failed."""
        return [
            "".join(part or "" for part in (call.stdout, call.stderr, _traceback(call)))
            for call in self._calls
        ]

    def close(self) -> None:
        """Let others have their turn; engines with a rank that has not ended are started again."""
        try:
            if not self.done():
                self._cluster.restart()
        finally:
            self._turn.release()

    def _raise_first_failure(self) -> None:
        state = self._cluster.state()
        if state["state"] != "ready":
            raise RankError(f"the engines ended during the call: {state['message']}", None)
        failed = [
            (rank, call.exception())
            for rank, call in enumerate(self._calls)
            if call.ready() and not call.successful()
        ]
        if not failed:
            return
        # Those that only say "rank k failed" stand behind the one that did.
        rank, error = min(failed, key=lambda pair: getattr(pair[1], "ename", "") == "RankFailed")
        name = getattr(error, "ename", type(error).__name__)
        value = str(getattr(error, "evalue", error))
        stuck = [str(r) for r, call in enumerate(self._calls) if not call.ready()]
        note = f"; rank {', '.join(stuck)} did not end: the engines start anew" if stuck else ""
        remote = str(getattr(error, "traceback", ""))
        if name == InvalidInput.__name__:
            raise Refused(f"{' '.join(value.split())}{note}", rank, remote)
        raise RankError(f"rank {rank} failed: {name}: {_gist(value)}{note}", rank, remote)


def _traceback(call: Any) -> str:
    failed = call.ready() and not call.successful()
    return str(getattr(call.exception(), "traceback", "")) if failed else ""


def _gist(message: str) -> str:
    """One line: TensorFlow puts what went wrong at the end of a page of traceback."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if line and not line.startswith("[[")]
    return told[-1] if told else message
