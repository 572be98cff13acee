"""Experiments that this process has submitted, and whose records this process writes.

`run_seeds` aggregates the runs of all seeds of one experiment into one run.
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
from labkit.cluster.folder_mirror import StreamForwarder
from labkit.cluster.last_experiment import remember
from labkit.cluster.launch import NotStarted
from labkit.cluster.restart_policy import TRIES, RestartPolicy, ranks_to_blame
from labkit.cluster.resume import begin_record
from labkit.cluster.run_handle import RunHandle
from labkit.common.errors import Pruned
from labkit.communicator.status_table import ENDED
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.records import checkpoints, store
from labkit.records.checkpoints import CheckpointContext
from labkit.records.endings import STOP_SIGNALS, interruption_text, raise_on_signals
from labkit.records.measure import aggregate
from labkit.records.result import RankResult, Row
from labkit.records.run import Run
from labkit.records.stream import FOLDER, Message, StreamReader, make_stream
from labkit.records.write import write, write_logs
from labkit.worker.work import work

PATIENCE = 20.0  # seconds that ranks get to end after a stop request, even under load
WRITING = 35.0  # PATIENCE if ranks also write a last checkpoint; a job waits even longer


class SubmittedRun(RunHandle):
    """A RunHandle in the process that has submitted the run, which also writes the record."""

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
        self._why: str | None = None  # why the run was stopped
        begin_record(directory, experiment, context)
        self._submitter = store.this_process() | {"host": socket.gethostname()}
        checkpoint_folder = str(directory / checkpoints.FOLDER)
        context = context and context._replace(folder=checkpoint_folder, owner=self._submitter)
        self._restarts = RestartPolicy(directory, experiment, context)
        make_stream(directory / FOLDER, self._submitter)
        self._reader = StreamReader(directory / FOLDER)  # reads the rows of ranks that die
        self._read_rows: list[Row] = []  # rows read so far, without rolled-back steps
        try:
            self._calls = self._send(experiment, context)
        except BaseException as error:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):  # the call was waiting for the ranks
                store.interrupt(directory, _why(error))
            else:  # for example, a callable cannot be pickled
                store.fail(directory, f"{type(error).__name__}: {error}")
            raise
        self._folder = cluster.folder

    def _send(self, experiment: Experiment, context: CheckpointContext | None) -> Calls[RankResult]:
        tries = TRIES if self._cluster.how.fault_tolerant else 1
        while True:
            tries -= 1
            try:
                return self._call(experiment, context)
            except NotStarted as error:  # such as the death of a rank during its start
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
        """Start to follow the run's messages; `show` displays the progress."""
        try:
            super().begin(show)
            remember(self._folder, self)
        except KeyboardInterrupt as error:  # the caller has no handle yet with which to stop
            self.end(_why(error))
            raise

    def end(self, reason: str = "stopped by the user") -> None:
        """Stop the ranks and wait for the record; if a rank does not end, the engines restart."""
        self._why = reason
        with suppress(OSError):  # a full disk makes the request fail; then the engines restart
            self.stop()
        if not self._ended.wait(self._patience):
            # The ranks did not end in time, so the run's thread stops waiting and restarts the
            # engines.
            self._given_up.set()
            self._ended.wait(PATIENCE)

    def result(self) -> Run:
        """Wait for the end of the run and return its record.

        An interrupt (Ctrl-C, or the notebook's stop button) stops the ranks and keeps the record.

        Raises:
            RankError: A rank failed; the record contains the cause and the output.
            Pruned: A hyperparameter search has ended the run; the record contains its results.
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
            if self._wants_end():  # the restarted ranks have nothing to save yet
                return

    def _attempt(self) -> Generator[None, None, RankError | None]:
        """Watch the current call until it ends; return the error if the call has no result."""
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
        """Return the ranks whose death has ended the call; none if an error has ended it."""
        # Even fault-tolerant engines all end if the only rank dies, or if a rank is stopped for
        # long.
        ended = self._cluster.how.fault_tolerant and self._calls.why_ended() is not None
        self._read(last=True)  # messages say which deaths the call has survived
        return ranks_to_blame(error, self._calls.dead(), ended, self._restarts.outlived)

    def _wants_end(self) -> bool:
        """Return whether a stop was requested."""
        return self._why is not None or self._stream.is_stop_requested()

    def _restart(self, dead: list[int], error: RankError) -> None:
        """Restart the engines and send the call again."""
        restarts = self._restarts
        restarts.note_deaths(dead)
        self._calls.close()
        self._read(last=True)  # the ranks write nothing after this point
        context = restarts.roll_back(dead, error)
        back = restarts.restarts[-1]["step"]
        self._read_rows = [row for row in self._rows() if row["step"] < back]
        summary = restarts.sentence
        print(summary, file=sys.stderr, flush=True)
        with self._drawing:
            self._add([("doing", {"what": summary})])
        if self._wants_end():  # a stop may arrive while the engines end
            return
        calls, self._calls = self._calls, self._send(restarts.experiment, context)
        restarts.note_restart()
        write_logs(self.directory, calls.outputs())  # after a failure, `_record_failure` does it

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
        """Return the rows that these dead ranks have written and that no result contains.

        Rows of a dead rank's last quarter of a second are lost. A spare continues the rows of the
        rank that it replaces.
        """
        rows = [row for row in self._rows() if row["rank"] in ranks] if ranks else []
        # If a restart has repeated a step, only the last row of the step counts.
        last = {(row["rank"], row["step"]): row for row in rows}
        known = {(row["rank"], row["step"]) for result in results.values() for row in result.rows}
        return [row for place, row in last.items() if place not in known]

    def _rows(self) -> list[Row]:
        """Return all rows that ranks have written, without rows of rolled-back steps."""
        while messages := self._reader.read():  # each call returns a limited number
            self._read_rows += [row for kind, row in messages if kind == "step"]
        return self._read_rows

    def _record_failure(self, error: BaseException) -> None:
        try:
            with suppress(OSError):  # the disk may be full; the run's cause then says so
                write_logs(self.directory, self._calls.outputs())
        finally:
            rank = getattr(error, "rank", None)
            end = store.interrupt if getattr(error, "signal", "") in STOP_SIGNALS else store.fail
            end(self.directory, str(error), rank)

    def _release(self) -> None:
        try:
            self._calls.close()
        finally:
            # The stream is no longer needed, because the run's history contains all its rows.
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def _emulated(experiment: Experiment) -> str | Network | None:
    """Return the network to emulate between ranks; None if the ranks emulate none."""
    elsewhere = experiment.clock == "virtual" or not experiment.strategy.emulated
    return None if elsewhere else experiment.network


def _why(error: KeyboardInterrupt) -> str:
    """Return the reason of a stop, if possible the reason that this kernel's job recorded."""
    job = os.environ.get("LABKIT_JOB")
    return (store.read_reason(Path(job)) if job else None) or interruption_text(error, "stopped")


def run_seeds(
    experiment: Experiment, run: Callable[[Experiment, Path], Run], top: Path | None = None
) -> Run:
    """Run each seed in a directory of its own, below the directory with the aggregated record.

    Args:
        experiment: Experiment with `repeats` above 1.
        run: Function that runs one seed in a directory.
        top: Directory of an earlier attempt, whose completed seeds do not run again; None: a new
            directory.
    """
    import pandas as pd

    top = top or store.run_directory(f"{experiment.label}-{experiment.hash8}")
    store.start(top, experiment.to_json())
    seeds = []
    try:
        for seed in range(experiment.seed, experiment.seed + experiment.repeats):
            folder = top / f"seed{seed}"
            folder.mkdir(exist_ok=True)
            if (folder / "status.json").exists() and Run(folder).status["state"] == "completed":
                seeds.append(Run(folder))
                continue
            seeds.append(run(experiment.replace(repeats=1, seed=seed), folder))
            if (status := seeds[-1].status)["state"] == "interrupted":  # by the stop button
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
    # Each row contains its seed, so one table holds the rows of all seeds.
    history = pd.concat([seed.history for seed in seeds], ignore_index=True)
    store.finish(top, aggregate(seeds), history)
    return Run(top)
