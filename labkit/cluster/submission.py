"""Experiments that this process has submitted; the process also writes their records.

`run_seeds` runs an experiment with several seeds, and aggregates the runs of all seeds into one
run.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from labkit.cluster.calls import Calls, ClusterProtocol, RankError
from labkit.cluster.launch import NotStarted
from labkit.cluster.restart_policy import TRIES, RestartPolicy, ranks_to_blame
from labkit.cluster.resume import begin_record
from labkit.cluster.run_handle import RunHandle, remember
from labkit.common.errors import Pruned
from labkit.communicator.status_table import ENDED
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.records import checkpoints, provenance, store
from labkit.records.checkpoints import CheckpointContext
from labkit.records.endings import STOP_SIGNALS, interruption_text, raise_on_signals
from labkit.records.run import Run
from labkit.records.run_metrics import RankResult, Row, aggregate
from labkit.records.stream import FOLDER, STOP, Message, StreamReader, StreamWriter, make_stream
from labkit.records.write import write, write_logs
from labkit.worker.work import work


class StreamForwarder:
    """Forwards messages between a run's folder and ranks whose hosts cannot see the folder.

    Args:
        folder: Folder of the message stream, inside the run's folder.
        calls: The running calls on the ranks that send the messages.
    """

    def __init__(self, folder: Path, calls: Calls[RankResult]) -> None:
        self._folder, self._calls = folder, calls
        self._writers: dict[int, StreamWriter] = {}
        self._stop_sent = False

    def forward(self, last: bool = False) -> None:
        """Write the ranks' new messages to the run's folder, and pass on a stop request once.

        Args:
            last: Whether to wait for messages that ended ranks have sent and that have not arrived
                yet.
        """
        for rank, message in self._calls.messages(wait=last):
            self._writers.setdefault(rank, StreamWriter(self._folder, rank, {})).append(message)
        # labkit sends the stop request after rank 0's first message. The first message of rank 0
        # shows that the rank has started.
        if not self._stop_sent and 0 in self._writers and (self._folder / STOP).exists():
            self._stop_sent = True
            self._calls.request_stop()


PATIENCE = 20.0  # After a stop request, ranks have 20 s (PATIENCE) to end.
# Ranks that write a last checkpoint have 35 s (WRITING) to end; batch jobs wait even longer.
WRITING = 35.0


class SubmittedRun(RunHandle):
    """A RunHandle in the process that has submitted the run and that writes its record."""

    def __init__(
        self,
        cluster: ClusterProtocol,
        experiment: Experiment,
        directory: Path,
        context: CheckpointContext | None = None,
    ) -> None:
        super().__init__(experiment, directory)
        self._patience = PATIENCE if context is None else WRITING
        self._cluster, self._given_up = cluster, threading.Event()
        self._requested = experiment
        self._why: str | None = None
        begin_record(directory, experiment, context)
        self._submitter = store.this_process() | {"host": socket.gethostname()}
        checkpoint_folder = str(directory / checkpoints.FOLDER)
        context = context and context._replace(folder=checkpoint_folder, owner=self._submitter)
        self._restarts = RestartPolicy(directory, experiment, context)
        make_stream(directory / FOLDER, self._submitter)
        # `_reader` reads the history rows that ranks wrote before they died.
        self._reader = StreamReader(directory / FOLDER)
        # `_read_rows` contains the history rows read so far, except rows of steps that a restart
        # has undone.
        self._read_rows: list[Row] = []
        try:
            self._calls = self._send(experiment, context)
        except BaseException as error:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            # The user has pressed Ctrl-C while the call was waiting for the ranks.
            if isinstance(error, KeyboardInterrupt):
                store.interrupt(directory, _why(error))
            else:  # `_send` fails, for example, if a callable of the experiment cannot be pickled.
                store.fail(directory, f"{type(error).__name__}: {error}")
            raise
        self._folder = cluster.folder

    def _send(self, experiment: Experiment, context: CheckpointContext | None) -> Calls[RankResult]:
        tries = TRIES if self._cluster.how.fault_tolerant else 1
        while True:
            tries -= 1
            try:
                return self._call(experiment, context)
            except NotStarted as error:  # the start failed, for example because a rank died
                if not tries or self._wants_end():
                    raise
                print(f"{error}; labkit starts the engines again", file=sys.stderr, flush=True)

    def _call(self, experiment: Experiment, context: CheckpointContext | None) -> Calls[RankResult]:
        return Calls(
            *(self._cluster, experiment.ranks, work, (experiment, context), _emulated(experiment)),
            spares=self._cluster.how.spares,
            stream=str(self.directory / FOLDER),
            submitter=self._submitter,
            deaths=self._restarts.deaths,
        )

    def begin(self, show: bool = False) -> None:
        """Start a thread that reads the run's messages, and displays progress if `show` is True."""
        try:
            super().begin(show)
            remember(self._folder, self)
        except KeyboardInterrupt as error:  # the caller does not yet have a handle to stop the run
            self.end(_why(error))
            raise

    def end(self, reason: str = "stopped by the user") -> None:
        """Stop the ranks and wait for the record; restart the engines if a rank hangs."""
        self._why = reason
        # If the disk is full, the stop request fails, and labkit restarts the engines instead.
        with suppress(OSError):
            self.stop()
        if not self._ended.wait(self._patience):
            # If the ranks have not ended in time, the thread that follows the run restarts the
            # engines.
            self._given_up.set()
            self._ended.wait(PATIENCE)

    def result(self) -> Run:
        """Wait for the end of the run and return its record.

        An interrupt (Ctrl-C, or the notebook's stop button) stops the ranks, and the record is
        still written.

        Raises:
            RankError: A rank failed; the record contains the cause and the output.
            Pruned: A hyperparameter search has ended the run early; the record contains the results
                so far.
        """
        try:
            with raise_on_signals():
                run = super().result()
        except KeyboardInterrupt as error:
            self.end(_why(error))
            raise
        if (status := run.status)["state"] == "pruned":
            raise Pruned(f"{run.name} {status['cause']}")
        return run

    def _watch(self) -> Iterator[None]:
        while True:
            error = yield from self._attempt()
            if error is None or (self._wants_end() and self._ranks_to_blame(error)):
                return
            if not (dead := self._ranks_to_blame(error)):
                raise error
            self._restart(dead, error)
            # Ranks that have just restarted have nothing to save, so the run can stop.
            if self._wants_end():
                return

    def _attempt(self) -> Generator[None, None, RankError | None]:
        """Watch the current call until it ends; return an error if the call returned no result."""
        try:
            yield from self._watch_calls()
        except RankError as error:
            return error
        results = self._calls.survivor_results() or {}
        if self._given_up.is_set() or any(result.whole is not None for result in results.values()):
            return None
        if not (dead := sorted(self._calls.dead())):
            return None
        ranks = ", ".join(map(str, dead))
        return RankError(f"rank {ranks} failed: {ENDED}, so its result is lost", dead[0])

    def _ranks_to_blame(self, error: RankError) -> list[int]:
        """Return the ranks whose death ended the call, none if a program error ended it."""
        # Fault-tolerant engines survive most deaths of ranks. Two events end even fault-tolerant
        # engines: the only rank dies, or a signal suspends a rank for long.
        ended = self._cluster.how.fault_tolerant and self._calls.why_ended() is not None
        self._read(last=True)  # The messages of the ranks tell which deaths the call has survived.
        return ranks_to_blame(error, self._calls.dead(), ended, self._restarts.outlived)

    def _wants_end(self) -> bool:
        """Return whether the user or this process has requested a stop."""
        return self._why is not None or self._stream.is_stop_requested()

    def _restart(self, dead: list[int], error: RankError) -> None:
        """Restart the engines, and send the call again from the newest checkpoint."""
        restarts = self._restarts
        restarts.note_deaths(dead)
        self._calls.close()
        self._read(last=True)  # All ranks of the call have ended, so no further message can arrive.
        context = restarts.roll_back(dead, error)
        back = restarts.restarts[-1]["step"]
        self._read_rows = [row for row in self._rows() if row["step"] < back]
        summary = restarts.sentence
        print(summary, file=sys.stderr, flush=True)
        with self._drawing:
            self._add([("doing", {"what": summary})])
        if self._wants_end():  # The user may request a stop while the engines end.
            return
        calls, self._calls = self._calls, self._send(restarts.experiment, context)
        restarts.note_restart()
        # If `_send` fails, `_record_failure` writes the logs of the ended call.
        write_logs(self.directory, calls.outputs())

    def _add(self, messages: list[Message]) -> None:
        self._restarts.read(messages)
        super()._add(messages)

    def _watch_calls(self) -> Iterator[None]:
        forwarder = StreamForwarder(self.directory / FOLDER, self._calls)
        for _ in self._calls.watch():
            if self._given_up.is_set():
                return
            forwarder.forward()
            yield
        forwarder.forward(last=True)

    def _finish(self) -> Run:
        write_logs(self.directory, self._calls.outputs())
        pruned = self._stream.is_prune_requested()
        results, dead = self._calls.survivor_results() or {}, self._calls.dead()
        rows = self._rows_of(dead, results)
        faults = self._restarts.restarts
        write(
            self.directory, self._requested, results, self._why, pruned, rows, faults, sorted(dead)
        )
        return Run(self.directory)

    def _rows_of(self, ranks: set[int], results: Mapping[int, RankResult]) -> list[Row]:
        """Return the history rows of dead ranks that the results of the call do not contain.

        Rows that a dead rank has produced in its last quarter of a second are lost. A spare rank
        adds rows under the number of the dead rank that it replaces.
        """
        rows = [row for row in self._rows() if row["rank"] in ranks] if ranks else []
        # If a restart has repeated a step, only the last row of this step is returned.
        last = {(row["rank"], row["step"]): row for row in rows}
        known = {(row["rank"], row["step"]) for result in results.values() for row in result.rows}
        return [row for place, row in last.items() if place not in known]

    def _rows(self) -> list[Row]:
        """Return all history rows that ranks have written, without rows of rolled-back steps."""
        # Each call of `StreamReader.read` returns a limited number of messages.
        while messages := self._reader.read():
            self._read_rows += [row for kind, row in messages if kind == "step"]
        return self._read_rows

    def _record_failure(self, error: BaseException) -> None:
        try:
            # A full disk may prevent the writing of logs.
            with suppress(OSError):
                write_logs(self.directory, self._calls.outputs())
        finally:
            rank = getattr(error, "rank", None)
            end = store.interrupt if getattr(error, "signal", "") in STOP_SIGNALS else store.fail
            end(self.directory, str(error), rank)

    def _release(self) -> None:
        try:
            self._calls.close()
        finally:
            # The message stream is no longer needed, because the run's history contains all its
            # rows.
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def _emulated(experiment: Experiment) -> str | Network | None:
    """Return the network that ranks emulate; None if they emulate no network."""
    elsewhere = experiment.clock == "virtual" or not experiment.strategy.emulated
    return None if elsewhere else experiment.network


def _why(error: KeyboardInterrupt) -> str:
    """Return why a run was stopped, from the record of this kernel's job or else from the error."""
    job = os.environ.get("LABKIT_JOB")
    return (store.read_reason(Path(job)) if job else None) or interruption_text(error, "stopped")


def run_seeds(
    experiment: Experiment, run: Callable[[Experiment, Path], Run], top: Path | None = None
) -> Run:
    """Run each seed in its own directory, inside the directory with the aggregated record.

    Args:
        experiment: Experiment whose field `repeats` is above 1.
        run: Function that runs the experiment with one seed in a given directory.
        top: Directory of an earlier attempt, whose finished seeds are not repeated. If `top` is
            None, labkit creates a new directory.
    """
    import pandas as pd

    top = top or store.run_directory(f"{experiment.label}-{experiment.hash8}")
    store.start(top, experiment.to_json())
    provenance.write(top, begin=True)
    seeds = []
    try:
        for seed in range(experiment.seed, experiment.seed + experiment.repeats):
            folder = top / f"seed{seed}"
            folder.mkdir(exist_ok=True)
            if (folder / "status.json").exists() and Run(folder).status["state"] == "completed":
                seeds.append(Run(folder))
                continue
            seeds.append(run(experiment.replace(repeats=1, seed=seed), folder))
            # A run has the state "interrupted" if the user has stopped it.
            if (status := seeds[-1].status)["state"] == "interrupted":
                store.interrupt(top, status["cause"])
                return Run(top)
    except KeyboardInterrupt as error:
        store.interrupt(top, _why(error))
        raise
    except Pruned as error:
        store.prune(top, str(error))
        raise
    except BaseException as error:
        end = store.interrupt if getattr(error, "signal", "") in STOP_SIGNALS else store.fail
        end(top, f"{type(error).__name__}: {error}", getattr(error, "rank", None))
        raise
    # Each row contains its seed, so one table can contain the rows of all seeds.
    history = pd.concat([seed.history for seed in seeds], ignore_index=True)
    provenance.write(top)
    store.finish(top, aggregate(seeds), history)
    return Run(top)
