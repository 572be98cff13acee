"""Kill ranks from outside at random moments of a call to `Cluster` or a command."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from labkit.bench.runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster.engines import LocalEngines
from labkit.cluster.lease import KEEPER, default_name, folder_of
from labkit.cluster.start import Start
from labkit.common.errors import LabkitError
from labkit.records.stream import FOLDER, StreamReader
from tests.acceptance.faults.entry_points import ENTRY_POINTS, WORKERS, Outcome

EARLY = ("reading data", "checking equivalence", "first step")
PHASES = ("starting", *EARLY[:2], "building the model", EARLY[2], "training", "evaluating")
LENGTHS = "call lengths"
LIMIT = 1000.0  # timeout of a call, and interval for reading rank reports
LOOK_EVERY = 0.01  # seconds


class Moment(NamedTuple):
    """The moment of a kill: a phase of the call, and a share of this phase's usual length."""

    phase: str
    share: float


class Sight:
    """The current phase of a call, according to the files that its ranks write.

    Args:
        folder: Folder in which the ranks report their progress.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: StreamReader | None = None
        self.begins: dict[str, float] = {}  # time at which the campaign first saw each phase
        self.phase = ""

    def look(self) -> None:
        """Read the files in which the ranks report their progress."""
        if self._reader is None:
            stream = next(self._folder.rglob(FOLDER), None)
            if stream is None:
                return
            self._reader = StreamReader(stream)
            self._enter("starting")
        for kind, record in self._reader.read():
            if kind == "doing":
                self._enter("first step" if record["what"] == "training" else record["what"])
            elif kind == "step" and self.phase == "first step":
                self._enter("training")

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.begins.setdefault(phase, time.monotonic())


def measure(repeats: int, known: Sequence[Row]) -> Iterator[Row]:
    """Kill a rank at a random moment of a call; all ways to run an experiment take turns.

    Moments are uniform over the call, but every third kill falls in one of three phases: data
    reading, equivalence check, or first step. A moment is a phase and a share of the length that
    this phase has in calls without a kill.

    Args:
        repeats: Number of kills that hit a call before its end.
        known: Rows of earlier runs of the campaign.

    Returns: One row with the lengths of the phases, and one row per kill: whether the call
        `finished`, whether its ledger of samples is `exact`, and whether the death is `recorded`
        once.
    """
    kills = [row for row in known if row["what"] == "calls"]
    struck = sum(bool(row["struck"]) for row in kills)
    number = 1 + max((int(row["number"] or 0) for row in kills), default=-1)
    if struck >= repeats:
        return
    with temporary_runs() as folder, _engines() as engines:
        usual = next((row for row in known if row["what"] == LENGTHS), None)
        if usual is None:
            engines.end()  # calls after a death also start new engines
            usual = _lengths(engines, folder / "undisturbed")
            yield usual
        lengths = {phase: float(usual[phase] or 0) for phase in PHASES}
        while struck < repeats:
            row = _kill(engines, folder / str(number), number, lengths)
            struck += bool(row["struck"])
            number += 1
            yield row


@contextmanager
def _engines() -> Iterator[LocalEngines]:
    """Start the engines that all ways to run an experiment share, and keep them between calls."""
    how = Start.from_options(WORKERS, fault_tolerant=True)
    name = default_name(how)
    engines = LocalEngines(folder_of(name), name, how)
    engines.start()
    try:
        yield engines
    finally:
        engines.release()


def draw(number: int, lengths: Mapping[str, float]) -> tuple[str, int, Moment]:
    """Draw how the experiment is run, which rank is killed, and when."""
    random = np.random.default_rng([number, 29])
    entry_point = list(ENTRY_POINTS)[number % len(ENTRY_POINTS)]
    rank = int(random.integers(WORKERS))
    if number % 3 == 0:
        return entry_point, rank, Moment(EARLY[number // 3 % 3], float(random.uniform()))
    at = float(random.uniform(0, sum(lengths.values())))
    for phase in PHASES:
        if at < lengths[phase]:
            return entry_point, rank, Moment(phase, at / lengths[phase])
        at -= lengths[phase]
    return entry_point, rank, Moment(PHASES[-1], 1.0)


def _lengths(engines: LocalEngines, folder: Path) -> Row:
    """Return the seconds of each phase of a call without a kill on new engines."""
    sight = Sight(folder)
    with _call(engines, "submit", folder, 0) as call:
        while not call.done():
            sight.look()
            time.sleep(LOOK_EVERY)
        call.result()
    ends = [*list(sight.begins.values())[1:], time.monotonic()]
    row = head("faults", "undisturbed", LENGTHS, WORKERS, None)
    row |= dict.fromkeys(PHASES, 0.0)
    return row | {p: end - sight.begins[p] for p, end in zip(sight.begins, ends, strict=True)}


@contextmanager
def _call(
    engines: LocalEngines, entry_point: str, folder: Path, number: int
) -> Iterator[Future[Outcome]]:
    """Start a call in a thread; restart the engines if a rank is missing."""
    if len(_ranks(engines)) < WORKERS:  # the rank died after it had returned its result
        engines.end()
        engines.start()
    folder.mkdir()
    os.environ["LABKIT_RUNS"] = str(folder / "runs")
    pool = ThreadPoolExecutor(1)
    try:
        yield pool.submit(ENTRY_POINTS[entry_point], folder, number)
    finally:
        pool.shutdown(wait=False)


def _kill(engines: LocalEngines, folder: Path, number: int, lengths: Mapping[str, float]) -> Row:
    """Kill a rank during one call; return the row of this kill."""
    entry_point, rank, moment = draw(number, lengths)
    sight, began = Sight(folder), time.monotonic()
    with _call(engines, entry_point, folder, number) as call:
        ranks, wanted = _ranks(engines), PHASES.index(moment.phase)
        if len(ranks) < WORKERS:
            raise LabkitError(f"ranks {sorted(ranks)} are there, and {WORKERS} are wanted")
        while not call.done() and (not sight.phase or PHASES.index(sight.phase) < wanted):
            sight.look()
            time.sleep(LOOK_EVERY)
        time.sleep(moment.share * lengths[moment.phase])
        struck, killed = not call.done(), time.monotonic()
        if struck:
            ranks[rank].kill()
            sight.look()
        outcome = _outcome(call)
        replaced = len(_ranks(engines)) == WORKERS
    seconds = time.monotonic()
    # The kill does not count if the killed rank had already returned its result. The phase alone
    # does not show this, because the campaign may read a rank's report only after the kill.
    last = sight.phase == PHASES[-1] or (not replaced and seconds - killed < lengths[PHASES[-1]])
    if last and not outcome.why and not outcome.faults:
        struck = False
    row = head("faults", f"{entry_point}, {sight.phase}", "calls", WORKERS, None, number=number)
    row |= {"door": entry_point, "phase": sight.phase, "rank": rank, "share": moment.share}
    row |= {"moment": killed - began, "struck": struck, "finished": not outcome.why}
    row |= {"exact": outcome.exact, "recorded": outcome.faults == 1, "why": outcome.why}
    return row | {"seconds": seconds - began, "after_s": seconds - killed}


def _outcome(call: Future[Outcome]) -> Outcome:
    try:
        return call.result(LIMIT)
    except Exception as error:  # any error means a lost run, which the row records
        return Outcome(0, False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _ranks(engines: LocalEngines) -> dict[int, psutil.Process]:
    """Return the processes of the ranks, as the operating system lists them."""
    lock, processes = str(engines.folder / "keeper.lock"), {}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if variables.get(KEEPER) == lock and "OMPI_COMM_WORLD_RANK" in variables:
                processes[int(variables["OMPI_COMM_WORLD_RANK"])] = process
        except psutil.Error:  # the process has ended or belongs to another user
            continue
    return processes
