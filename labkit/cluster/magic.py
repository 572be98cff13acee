"""%%ranks: a cell on all ranks that ends when one of them fails, and says where the others were."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from labkit.cluster.calls import LOOK_EVERY, CallRequest, RankError, Ranks
from labkit.cluster.lease import Turn
from labkit.cluster.stack_probe import ask
from labkit.common.errors import InvalidInput
from labkit.communicator.clock import WALL
from labkit.communicator.process_inspector import look
from labkit.communicator.status_table import ENDED
from labkit.records.endings import ASKS, End

ASK_EVERY = 1.0  # seconds after which a rank is asked again where it is
TRIES = 3  # times that engines whose ranks die before a cell begins start anew
GRACE = 0.5  # seconds in which other ranks may fail by themselves, of the same error


class CellFailed(RankError):
    """A cell of `%%ranks` failed on a rank; its traceback has been shown by then."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of labkit's own frames."""
        return [f"{type(self).__name__}: {self}"]


class DeathInCell(CellFailed):
    """The process of a rank has ended in a cell."""


def register(cluster: Ranks) -> None:
    """Let `%%ranks` in this IPython run its cells on these ranks, beside ipyparallel's `%%px`."""
    from IPython import get_ipython

    def ranks(line: str, cell: str) -> None:
        """Run the cell on all ranks; end it as soon as one fails, and say where the others are.

        With `retries=2` it runs again, up to so often, on engines that start anew after a death.
        """
        retries = retries_of(line)
        if not cluster.connected:
            raise InvalidInput(f"cluster {cluster.name!r} is closed; make a lk.Cluster again")
        run_cell(cluster, cell, retries)

    get_ipython().register_magic_function(ranks, "cell", "ranks")


def retries_of(line: str) -> int:
    """How often the line of a cell allows to run it again.

    >>> retries_of(""), retries_of("retries=2")
    (0, 2)
    """
    if not line.strip():
        return 0
    name, _, number = line.strip().partition("=")
    if name != "retries" or not number.isdecimal():
        raise InvalidInput(
            f"%%ranks {line.strip()}: it runs on all ranks, and takes retries=2 or the like alone: "
            "how often the cell may run again where a rank has died"
        )
    return int(number)


def run_cell(cluster: Ranks, source: str, retries: int = 0) -> None:
    """Run source on all ranks, in the namespace of `%%px`, and show what each says, in rank order.

    When a rank raises, its traceback is shown at once, and for the ranks that have not ended the
    call in which they are. These are interrupted; where one does not come back, such as from a
    call that blocks inside MPI, the engines start anew, with what cells have defined on the others.
    A cell that runs for longer than the cluster's limit goes on, and says where its ranks are.
    An interrupt of the cell ends it on the ranks in the same way. So does the death of a rank: all
    engines start anew, with what cells have defined on those that live. What the cell has done by
    then may not be done twice, so that it runs again on request alone.

    Args:
        cluster: of the ranks.
        source: of the cell.
        retries: how often it may run again where a rank has died.

    Raises:
        CellFailed: a rank failed, or the engines ended.
    """
    turn = Turn(cluster.folder)
    try:
        for left in reversed(range(retries + 1)):
            try:
                return _Cell(cluster, source).run()
            except DeathInCell as error:
                if not left:
                    raise
                _say(f"rank {error.rank} died: the cell runs again")
    finally:
        turn.release()


class _Cell(CallRequest):
    """One cell while the ranks run it."""

    def __init__(self, cluster: Ranks, source: str) -> None:
        self._processes = _processes(cluster)
        client, engines = cluster.client, cluster.engines
        super().__init__(cluster, [client[e].execute(source, silent=False) for e in engines])
        self._places: dict[int, tuple[str | None, float]] = {}  # and since when
        self._begun = self._asked_at = time.monotonic()
        self._told = False

    def dead(self) -> set[int]:
        """Nobody once all have done their parts: a death behind these is the next cell's."""
        return set() if self._is_done() else super().dead()

    def _is_done(self) -> bool:
        """Whether all ranks have done their parts of the cell."""
        return all(call.ready() and call.successful() for call in self._calls)

    def run(self) -> None:
        """Wait for the ranks, or for the first that fails."""
        try:
            self._watch()
        except KeyboardInterrupt:
            self._end()
            raise
        if dead := sorted(self.dead()):
            who = ", ".join(map(str, dead))
            _say(f"rank {who} failed: {ENDED}")
            told = "; ".join([f"rank {who} failed: {ENDED}", *self._end(dead)])
            raise DeathInCell(f"{told}; the engines start anew", dead[0])
        first = self.first_failure()
        if first is None:
            return self._show()
        name, value, traceback = self.failure(first)
        _say(f"rank {first} failed:\n{traceback or value}")
        self.wait(GRACE)
        gist = value.strip().split("\n")[0]
        told = "; ".join([f"rank {first} failed: {name}: {gist}", *self._end()])
        raise CellFailed(told, first, traceback)

    def _watch(self) -> None:
        while self.running() and self.first_failure() is None and not self.dead():
            time.sleep(LOOK_EVERY)
            if time.monotonic() - self._asked_at > ASK_EVERY:
                self._ask()
            if not self._told and self._asked_at - self._begun > self._cluster.limit:
                self._told = True
                _say("\n".join(self._where(rank) for rank in self.running()))
            if not self._is_done() and (how := self.why_ended()) is not None:
                lost = how.rank is not None and self._cluster.how.fault_tolerant
                kind = DeathInCell if lost and how.signal not in ASKS else CellFailed
                raise kind(f"the engines ended: {how.message}", how.rank, signal=how.signal)

    def _ask(self) -> None:
        """Ask the ranks that run where they are, and keep since when they are there."""
        ranks, now = self.running(), time.monotonic()
        told: list[str | None] = [None] * len(ranks)
        if self._cluster.how.is_local:
            told = ask(self._cluster.folder, [self._processes[rank] for rank in ranks])
        for rank, place in zip(ranks, told, strict=True):
            before, since = self._places.get(rank, ("", now))
            self._places[rank] = place, since if place == before else now
        self._asked_at = now

    def _end(self, dead: Sequence[int] = ()) -> list[str]:
        """End the cell on all ranks and show what they said; where the others were, in words."""
        stuck = self.running()
        where: list[str] = []
        if stuck:
            self._ask()
            where = [self._where(rank) for rank in stuck]
            _say("\n".join(where))
            self._interrupt(stuck)
            self.wait(self.grace)
        self._show()
        if lost := self.running():
            _say(_LOST.format(ranks=", ".join(map(str, lost)), seconds=self.grace))
        if lost := [*lost, *dead]:
            self._cluster.rebuild(lost)
            _ = self._cluster.client  # %%px, too, finds ranks in the next cell
        return where

    def _interrupt(self, ranks: Sequence[int]) -> None:
        # By signal, not by message: an engine in a cell reads none.
        if not self._cluster.how.is_local:
            engines = [self._cluster.engines[rank] for rank in ranks]
            self._cluster.client.send_signal(signal.SIGINT, engines, block=False)
            return
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGINT)

    def _where(self, rank: int) -> str:
        place, since = self._places[rank]
        if not self._cluster.how.is_local:
            host = self._cluster.state()["hosts"][rank]
            return f"rank {rank} on host {host} is still in the cell"
        if place is None:
            (process_snapshot,) = look([self._processes[rank]], WALL)
            return f"rank {rank} lets no other thread run, and is {process_snapshot}"
        seconds = time.monotonic() - since
        return f"rank {rank} waits in {place}" + (f" since {seconds:.0f} s" if seconds > 1 else "")

    def _show(self) -> None:
        """What the ranks have printed and displayed, in rank order."""
        from IPython.display import display

        for rank, call in enumerate(self._calls):
            if call.ready():
                # A result may arrive before what the cell has printed: they take different sockets.
                call.wait_for_output(self.grace)
            said = call.metadata
            shown = [*said["outputs"], *filter(None, [said["execute_result"]])]
            if said["stdout"] or said["stderr"] or shown:
                print(f"[rank {rank}]")
            print(said["stdout"], end="", flush=True)
            print(said["stderr"], end="", file=sys.stderr, flush=True)
            for each in shown:
                display(each["data"], metadata=each["metadata"], raw=True)


def _processes(cluster: Ranks) -> list[int]:
    """Of the ranks; where one has died since the last cell, all engines start anew first."""
    last = End()
    for _ in range(TRIES):
        client, engines = cluster.client, cluster.engines
        calls = [client[e].apply_async(os.getpid) for e in engines]
        call_request = CallRequest(cluster, calls)
        call_request.wait(cluster.limit)
        if dead := sorted(call_request.dead()):
            last = End(f"rank {', '.join(map(str, dead))} failed: {ENDED}", dead[0])
            cluster.rebuild(dead)
        elif (how := call_request.why_ended()) is not None:
            last = how
        else:
            return [call.get() for call in calls]
    raise CellFailed(f"{last.message}, before the cell began, {TRIES} times in a row", last.rank)


_LOST = (
    "rank {ranks} did not come back within {seconds:.0f} s: a call that blocks inside MPI cannot "
    "be interrupted. The engines start anew."
)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
