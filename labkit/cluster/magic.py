"""Cell magics: %%ranks runs a cell on all ranks, and %%fault injects a fault into a run."""

from __future__ import annotations

import ast
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from labkit.cluster.calls import POLL_INTERVAL, ClusterProtocol, PendingCalls, RankError
from labkit.cluster.lease import Turn
from labkit.cluster.stack_probe import request_locations
from labkit.common.errors import InvalidInput, gist
from labkit.communicator.clock import WALL
from labkit.communicator.status_table import ENDED, inspect_processes
from labkit.experiment import Experiment
from labkit.network import Fault
from labkit.records.endings import STOP_SIGNALS, End

ASK_EVERY = 1.0  # labkit asks each rank once per second (ASK_EVERY) which call it is executing.
TRIES = 3  # If ranks die before the cell starts, labkit tries the cell at most three times (TRIES).
# After a rank has failed, labkit waits 0.5 s (GRACE). Other ranks may fail with the same error.
GRACE = 0.5


class CellFailed(RankError):
    """Raised when a cell of `%%ranks` fails on a rank; the traceback is already on the screen."""

    def _render_traceback_(self) -> list[str]:
        """Return one line for IPython to show, instead of a traceback through labkit's code."""
        return [f"{type(self).__name__}: {self}"]


class DeathInCell(CellFailed):
    """Raised when the process of a rank died during a cell."""


def register(cluster: ClusterProtocol) -> None:
    """Register the magic `%%ranks` in this IPython, for the ranks of a cluster."""
    from IPython import get_ipython

    def ranks(line: str, cell: str) -> None:
        """Run the cell on all ranks, and end the cell if a rank fails.

        With the option `retries=2`, the cell runs again up to two times after the death of a rank.
        """
        retries = retries_of(line)
        if not cluster.connected:
            raise InvalidInput(f"cluster {cluster.name!r} is closed; create a new lk.Cluster")
        run_cell(cluster, cell, retries)

    get_ipython().register_magic_function(ranks, "cell", "ranks")


def retries_of(line: str) -> int:
    """Return the number of repetitions that the options on the cell's first line allow.

    >>> retries_of(""), retries_of("retries=2")
    (0, 2)
    """
    if not line.strip():
        return 0
    name, _, number = line.strip().partition("=")
    if name != "retries" or not number.isdecimal():
        raise InvalidInput(
            f"%%ranks {line.strip()} is not allowed; the only option is retries=N, such as "
            "retries=2: how often the cell may run again after the death of a rank"
        )
    return int(number)


def run_cell(cluster: ClusterProtocol, source: str, retries: int = 0) -> None:
    """Run source on all ranks, in the namespace of `%%px`; show the outputs in rank order.

    When a rank raises an exception, labkit shows its traceback at once. It also shows the current
    call of each rank that is still running. When a rank raises an exception, the ranks that are
    still running are interrupted. A rank in a blocking MPI call may not return after the interrupt.
    If a rank does not return after the interrupt, the engines restart. A restart of the engines
    preserves the variables of the other ranks.

    A cell that runs longer than the cluster's timeout continues. After the timeout, labkit shows
    the current calls of the cell's ranks. When the user interrupts a cell, the cell also ends on
    all ranks. After the death of a rank, all engines restart, and the variables of the surviving
    ranks are preserved. After a rank's death, the cell runs again at most `retries` times. Repeated
    side effects of a cell may be wrong.

    Args:
        cluster: Cluster of the ranks.
        source: Source code of the cell.
        retries: How often the cell may run again after the death of a rank.

    Raises:
        CellFailed: A rank failed, or the engines ended.
    """
    turn = Turn(cluster.folder)
    try:
        for remaining in reversed(range(retries + 1)):
            try:
                return _Cell(cluster, source).run()
            except DeathInCell as error:
                if not remaining:
                    raise
                _print(f"rank {error.rank} died, so the cell runs again")
    finally:
        turn.release()


class _Cell(PendingCalls):
    """One execution of a cell on the ranks."""

    def __init__(self, cluster: ClusterProtocol, source: str) -> None:
        self._processes = _processes(cluster)
        client, engines = cluster.client, cluster.engines
        super().__init__(cluster, [client[e].execute(source, silent=False) for e in engines])
        # `_locations` contains the current call of each rank, and the time at which the call began.
        self._locations: dict[int, tuple[str | None, float]] = {}
        self._started_at = self._asked_at = time.monotonic()
        self._warned = False

    def dead(self) -> set[int]:
        """Return the dead ranks, or an empty set if all ranks have already completed the cell."""
        return set() if self._is_done() else super().dead()

    def _is_done(self) -> bool:
        """Return whether all ranks have completed the cell."""
        return all(call.ready() and call.successful() for call in self._calls)

    def run(self) -> None:
        """Wait until all ranks have ended the cell or a rank has failed; show the output."""
        try:
            self._watch()
        except KeyboardInterrupt:
            self._end()
            raise
        if dead := sorted(self.dead()):
            numbers = ", ".join(map(str, dead))
            _print(f"rank {numbers} failed: {ENDED}")
            message = "; ".join([f"rank {numbers} failed: {ENDED}", *self._end(dead)])
            raise DeathInCell(f"{message}; the engines restart", dead[0])
        first = self.first_failure()
        if first is None:
            return self._show()
        name, value, traceback = self.failure(first)
        _print(f"rank {first} failed:\n{traceback or value}")
        self.wait(GRACE)
        message = "; ".join([f"rank {first} failed: {name}: {gist(value)}", *self._end()])
        raise CellFailed(message, first, traceback)

    def _watch(self) -> None:
        while self.running() and self.first_failure() is None and not self.dead():
            time.sleep(POLL_INTERVAL)
            if time.monotonic() - self._asked_at > ASK_EVERY:
                self._update_locations()
            if not self._warned and self._asked_at - self._started_at > self._cluster.timeout:
                self._warned = True
                _print("\n".join(self._location(rank) for rank in self.running()))
            if not self._is_done() and (how := self.why_ended()) is not None:
                lost = how.rank is not None and self._cluster.how.fault_tolerant
                kind = DeathInCell if lost and how.signal not in STOP_SIGNALS else CellFailed
                raise kind(f"the engines ended: {how.message}", how.rank, signal=how.signal)

    def _update_locations(self) -> None:
        """Ask the running ranks for their current calls, and record when each call began."""
        ranks, now = self.running(), time.monotonic()
        calls: list[str | None] = [None] * len(ranks)
        if self._cluster.how.is_local:
            calls = request_locations(
                self._cluster.folder, [self._processes[rank] for rank in ranks]
            )
        for rank, call in zip(ranks, calls, strict=True):
            before, since = self._locations.get(rank, ("", now))
            self._locations[rank] = call, since if call == before else now
        self._asked_at = now

    def _end(self, dead: Sequence[int] = ()) -> list[str]:
        """End the cell on all ranks, show the output, and return calls of ranks still running."""
        stuck = self.running()
        locations: list[str] = []
        if stuck:
            self._update_locations()
            locations = [self._location(rank) for rank in stuck]
            _print("\n".join(locations))
            self._interrupt(stuck)
            self.wait(self.grace)
        self._show()
        if lost := self.running():
            _print(_LOST.format(ranks=", ".join(map(str, lost)), seconds=self.grace))
        if lost := [*lost, *dead]:
            self._cluster.rebuild(lost)
            # Access to the property `client` restarts the engines at once. Without an access to
            # `client`, the next `%%px` cell would find no engines.
            _ = self._cluster.client
        return locations

    def _interrupt(self, ranks: Sequence[int]) -> None:
        # The interrupt is a signal, because an engine that executes a cell reads no messages.
        if not self._cluster.how.is_local:
            engines = [self._cluster.engines[rank] for rank in ranks]
            self._cluster.client.send_signal(signal.SIGINT, engines, block=False)
            return
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank], signal.SIGINT)

    def _location(self, rank: int) -> str:
        call, since = self._locations[rank]
        if not self._cluster.how.is_local:
            host = self._cluster.state()["hosts"][rank]
            return f"rank {rank} on host {host} is still executing the cell"
        if call is None:
            (process_snapshot,) = inspect_processes([self._processes[rank]], WALL)
            return f"rank {rank} holds Python's GIL, and is {process_snapshot}"
        seconds = time.monotonic() - since
        return f"rank {rank} waits in {call}" + (f" since {seconds:.0f} s" if seconds > 1 else "")

    def _show(self) -> None:
        """Show the output of the ranks in rank order."""
        from IPython.display import display

        for rank, call in enumerate(self._calls):
            if call.ready():
                # Results and output arrive over different sockets, so the output may arrive after
                # the result.
                call.wait_for_output(self.grace)
            output = call.metadata
            displayed = [*output["outputs"], *filter(None, [output["execute_result"]])]
            if output["stdout"] or output["stderr"] or displayed:
                print(f"[rank {rank}]")
            print(output["stdout"], end="", flush=True)
            print(output["stderr"], end="", file=sys.stderr, flush=True)
            for item in displayed:
                display(item["data"], metadata=item["metadata"], raw=True)


def _processes(cluster: ClusterProtocol) -> list[int]:
    """Return the pids of the ranks; first restart all engines if an engine has died."""
    last = End()
    for _ in range(TRIES):
        client, engines = cluster.client, cluster.engines
        calls = [client[e].apply_async(os.getpid) for e in engines]
        pending = PendingCalls(cluster, calls)
        pending.wait(cluster.timeout)
        if dead := sorted(pending.dead()):
            last = End(f"rank {', '.join(map(str, dead))} failed: {ENDED}", dead[0])
            cluster.rebuild(dead)
        elif (how := pending.why_ended()) is not None:
            last = how
        else:
            return [call.get() for call in calls]
    raise CellFailed(
        f"{last.message}; the engines failed {TRIES} times in a row before the cell began",
        last.rank,
    )


_LOST = (
    "rank {ranks} did not end the cell within {seconds:.0f} s, because a call that blocks inside "
    "MPI cannot be interrupted. The engines of all ranks restart."
)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_faults: list[Fault] = []


def with_injected_faults(experiment: Experiment) -> Experiment:
    """Return the experiment, with the faults of the current `%%fault` cell added."""
    if not _faults:
        return experiment
    return experiment.replace(faults=(*experiment.faults, *_faults))


@contextmanager
def fault_injected(fault: Fault) -> Iterator[None]:
    """Inject the fault into each experiment that runs inside the context."""
    _faults.append(fault)
    try:
        yield
    finally:
        _faults.remove(fault)


def parse_fault(line: str) -> Fault:
    """Return the fault that a line such as `rank=2 step=10 kind=kill` describes."""
    words = [word.partition("=") for word in line.split()]
    if not words or not all(value for _, _, value in words):
        raise InvalidInput(
            f"%%fault {line.strip()}: give options as name=value, as in %%fault rank=2 step=10 "
            "kind=kill"
        )
    return Fault(**{name: value for name, _, value in words})


def register_fault_magic() -> None:
    """Register the magic `%%fault` in this IPython."""
    from IPython import get_ipython

    shell = get_ipython()

    def fault(line: str, cell: str) -> Any:
        """Run the cell, and inject the fault that the line describes into its experiments."""
        with fault_injected(parse_fault(line)):
            return _run(cell, shell)

    shell.register_magic_function(fault, "cell", "fault")


def _run(cell: str, shell: Any) -> Any:
    """Run a cell without catching its errors; return the value of its last expression."""
    statements = ast.parse(shell.transform_cell(cell)).body
    end = statements.pop() if statements and isinstance(statements[-1], ast.Expr) else None
    module = ast.Module(statements, type_ignores=[])
    exec(compile(module, "<%%fault>", "exec"), shell.user_ns)
    if isinstance(end, ast.Expr):
        return eval(compile(ast.Expression(end.value), "<%%fault>", "eval"), shell.user_ns)
    return None
