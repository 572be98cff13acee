"""An experiment that this process has submitted: it alone can write the record.

Where the record goes, and how the seeds of one experiment make one run.
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

from labkit.cluster.calls import Calls, RankError, Ranks
from labkit.cluster.carrier import Carrier
from labkit.cluster.last_experiment import note
from labkit.cluster.launch import NotStarted
from labkit.cluster.live import Live
from labkit.cluster.restart_policy import TRIES, Setbacks, victims
from labkit.cluster.resume import begin
from labkit.common.errors import Pruned
from labkit.communicator.status_table import ENDED
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.records import checkpoints, store
from labkit.records.checkpoints import CheckpointContext
from labkit.records.endings import ASKS, by_whom, warned
from labkit.records.measure import aggregate
from labkit.records.result import RankResult, Row
from labkit.records.run import Run
from labkit.records.stream import FOLDER, Reader, Told, make_stream
from labkit.records.write import write, write_logs
from labkit.worker.work import work

PATIENCE = 20.0  # seconds that ranks get to end after the user has asked: load is no hang
WRITING = 35.0  # the same where they write a last checkpoint; a job's own patience is longer


class Submitted(Live):
    """A Live whose end is this process's to write down."""

    def __init__(
        self,
        cluster: Ranks,
        experiment: Experiment,
        directory: Path,
        keeping: CheckpointContext | None = None,
    ) -> None:
        super().__init__(experiment, directory)
        self._patience = PATIENCE if keeping is None else WRITING
        self._cluster, self._given_up = cluster, threading.Event()
        self._asked = experiment
        self._why: str | None = None  # it was stopped, if it was
        begin(directory, experiment, keeping)
        self._submitter = store.this_process() | {"host": socket.gethostname()}
        kept = str(directory / checkpoints.FOLDER)
        keeping = keeping and keeping._replace(folder=kept, owner=self._submitter)
        self._setbacks = Setbacks(directory, experiment, keeping)
        make_stream(directory / FOLDER, self._submitter)
        self._reader = Reader(directory / FOLDER)  # by ranks that may die
        self._taken: list[Row] = []  # what they said before the call was sent last
        try:
            self._calls = self._send(experiment, keeping)
        except BaseException as error:
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            if isinstance(error, KeyboardInterrupt):  # while it waited for its turn
                store.interrupt(directory, _why(error))
            else:  # such as a callable that cannot travel
                store.fail(directory, f"{type(error).__name__}: {error}")
            raise
        self._folder = cluster.folder

    def _send(self, experiment: Experiment, keeping: CheckpointContext | None) -> Calls[RankResult]:
        tries = TRIES if self._cluster.how.fault_tolerant else 1
        while True:
            tries -= 1
            try:
                return self._call(experiment, keeping)
            except NotStarted as error:  # such as by the death of a rank that just starts
                if not tries or self._wants_end():
                    raise
                print(f"{error}; they start again", file=sys.stderr, flush=True)

    def _call(self, experiment: Experiment, keeping: CheckpointContext | None) -> Calls[RankResult]:
        return Calls(
            *(self._cluster, experiment.ranks, work, (experiment, keeping), _emulated(experiment)),
            spares=self._cluster.how.spares,
            stream=str(self.directory / FOLDER),
            submitter=self._submitter,
            deaths=self._setbacks.deaths,
        )

    def begin(self, show: bool = False) -> None:
        """Follow it from here on, and show it."""
        try:
            super().begin(show)
            note(self._folder, self)
        except KeyboardInterrupt as error:  # nobody has the Live yet to stop it by
            self.end(_why(error))
            raise

    def end(self, why: str = "stopped by the user") -> None:
        """Stop the ranks, wait for the record; the engines of ranks that do not end start anew."""
        self._why = why
        with suppress(OSError):  # where nothing can be written they are not asked, but given up
            self.stop()
        if not self._ended.wait(self._patience):
            # Ranks that did not end when asked: the thread lets go of them, and their engines start
            # anew.
            self._given_up.set()
            self._ended.wait(PATIENCE)

    def result(self) -> Run:
        """Wait for the end; return the record.

        An interrupt (Ctrl-C, the notebook's stop button) stops the ranks and keeps what they did.

        Raises:
            RankError: a rank failed; the record keeps its cause and its output.
            Pruned: a search has ended it; the record keeps what it came to.
        """
        try:
            with warned():
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
            if error is None or (self._wants_end() and self._victims(error)):
                return
            if not (dead := self._victims(error)):
                raise error
            self._go_back(dead, error)
            if self._wants_end():  # meanwhile: its ranks have nothing yet that could be kept
                return

    def _attempt(self) -> Generator[None, None, RankError | None]:
        """Watch what was sent last to its end; why there is no result."""
        try:
            yield from self._watch_calls()
        except RankError as error:
            return error
        found = self._calls.of_the_living() or {}
        if self._given_up.is_set() or any(each.whole is not None for each in found.values()):
            return None
        if not (dead := sorted(self._calls.dead())):
            return None
        who = ", ".join(map(str, dead))
        return RankError(f"rank {who} failed: {ENDED}, and the result with it", dead[0])

    def _victims(self, error: RankError) -> list[int]:
        """The ranks by whose death the call has ended; none where it failed by an error."""
        # Where one rank is all there are, or one is stopped for long, all engines end.
        ended = self._cluster.how.fault_tolerant and self._calls.why_ended() is not None
        self._take(last=True)  # by which ranks tell whom they have outlived
        return victims(error, self._calls.dead(), ended, self._setbacks.outlived)

    def _wants_end(self) -> bool:
        """Whether somebody wants the run to end."""
        return self._why is not None or self._stream.wants_stop()

    def _go_back(self, dead: list[int], error: RankError) -> None:
        """Let the engines start anew, and send the call again."""
        setbacks = self._setbacks
        setbacks.notice(dead)
        self._calls.close()
        self._take(last=True)  # from here on nobody tells more
        keeping = setbacks.go_back(dead, error)
        back = setbacks.told[-1]["step"]
        self._taken = [row for row in self._rows() if row["step"] < back]
        told = setbacks.sentence
        print(told, file=sys.stderr, flush=True)
        with self._drawing:
            self._add([("doing", {"what": told})])
        if self._wants_end():  # meanwhile: engines take long to end
            return
        calls, self._calls = self._calls, self._send(setbacks.experiment, keeping)
        setbacks.sent()
        write_logs(self.directory, calls.outputs())  # now: if nothing is sent, `_lose` writes them

    def _add(self, told: list[Told]) -> None:
        self._setbacks.hear(told)
        super()._add(told)

    def _watch_calls(self) -> Iterator[None]:
        carrier = Carrier(self.directory / FOLDER, self._calls)
        for _ in self._calls.watch():
            if self._given_up.is_set():
                return
            carrier.carry()
            yield
        carrier.carry(last=True)

    def _keep(self) -> Run:
        write_logs(self.directory, self._calls.outputs())
        pruned = self._stream.asked_to_prune()
        found, dead = self._calls.of_the_living() or {}, self._calls.dead()
        told = self._told_by(dead, found)
        faults = self._setbacks.told
        write(self.directory, self._asked, found, self._why, pruned, told, faults, sorted(dead))
        return Run(self.directory)

    def _told_by(self, ranks: set[int], found: Mapping[int, RankResult]) -> list[Row]:
        """The rows of ranks that have died, but for those of their last quarter of a second.

        A spare that has taken the place of one goes on from there.
        """
        rows = [row for row in self._rows() if row["rank"] in ranks] if ranks else []
        # Of a step that was repeated the last counts.
        last = {(row["rank"], row["step"]): row for row in rows}
        known = {(row["rank"], row["step"]) for each in found.values() for row in each.rows}
        return [row for place, row in last.items() if place not in known]

    def _rows(self) -> list[Row]:
        """All rows that ranks have told, but for those of steps that were taken back."""
        while told := self._reader.read():  # so much at a time
            self._taken += [row for kind, row in told if kind == "step"]
        return self._taken

    def _lose(self, error: BaseException) -> None:
        try:
            with suppress(OSError):  # such as a full disk: the cause says so, if it is that
                write_logs(self.directory, self._calls.outputs())
        finally:
            rank = getattr(error, "rank", None)
            end = store.interrupt if getattr(error, "signal", "") in ASKS else store.fail
            end(self.directory, str(error), rank)

    def _close(self) -> None:
        try:
            self._calls.close()
        finally:
            # All that was told stands in the history now.
            shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def _emulated(experiment: Experiment) -> str | Network | None:
    """The network between its ranks; what lies in a virtual one is played within one rank."""
    elsewhere = experiment.clock == "virtual" or not experiment.strategy.emulated
    return None if elsewhere else experiment.network


def _why(error: KeyboardInterrupt) -> str:
    """Who has stopped it: the job that this process is the kernel of may know better."""
    job = os.environ.get("LABKIT_JOB")
    return (store.reason(Path(job)) if job else None) or by_whom(error, "stopped")


def run_seeds(
    experiment: Experiment, run: Callable[[Experiment, Path], Run], top: Path | None = None
) -> Run:
    """Run each seed into a directory of its own below one that holds what they say together.

    Args:
        experiment: with its repeats.
        run: runs one seed into a directory.
        top: the directory of an earlier attempt: seeds that completed there are not run again.
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
        end = store.interrupt if getattr(error, "signal", "") in ASKS else store.fail
        end(top, f"{type(error).__name__}: {error}", getattr(error, "rank", None))
        raise
    # Rows know their seed, so that one table holds them all.
    history = pd.concat([seed.history for seed in seeds], ignore_index=True)
    store.finish(top, aggregate(seeds), history)
    return Run(top)
