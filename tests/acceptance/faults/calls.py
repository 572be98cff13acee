"""Kill ranks from outside at any moment of a call, through every entry point."""

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

from labkit.bench.temporary_runs import temporary_runs
from labkit.bench.timing import Row, head
from labkit.cluster.cluster_name import default_name, folder_of
from labkit.cluster.lease import KEEPER
from labkit.cluster.local_engines import LocalEngines
from labkit.cluster.start import Start
from labkit.common.errors import LabkitError
from labkit.records.stream import FOLDER, StreamReader
from tests.acceptance.faults.entry_points import ENTRY_POINTS, WORKERS, Outcome

EARLY = ("reading data", "checking equivalence", "first step")
PHASES = ("starting", *EARLY[:2], "building the model", EARLY[2], "training", "evaluating")
LENGTHS = "call lengths"
LIMIT = 1000.0  # seconds in which a call ends, whatever becomes of its ranks
LOOK_EVERY = 0.01  # seconds


class Moment(NamedTuple):
    """When a rank is killed: in this phase, when this share of its usual length is over."""

    phase: str
    share: float


class Sight:
    """The phase of a call, seen from outside.

    Args:
        folder: in which its ranks tell what they do.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: StreamReader | None = None
        self.begins: dict[str, float] = {}  # when each phase was first seen
        self.phase = ""

    def look(self) -> None:
        """Read what ranks have reported."""
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
    """Kill a rank at a moment that is uniform over a whole call, through each entry point in turn.

    Every third kill falls into reading data, the check of equivalence, or the first step. Moments
    are shares of what phases take where nobody disturbs them.

    Args:
        repeats: kills that strike.
        known: rows that there are already.

    Returns: a row of phases' lengths, and a row a kill: whether the call `finished`, whether its
        ledger is `exact`, and whether it has `recorded` the death once.
    """
    kills = [row for row in known if row["what"] == "calls"]
    struck = sum(bool(row["struck"]) for row in kills)
    number = 1 + max((int(row["number"] or 0) for row in kills), default=-1)
    if struck >= repeats:
        return
    with temporary_runs() as folder, _engines() as engines:
        usual = next((row for row in known if row["what"] == LENGTHS), None)
        if usual is None:
            engines.end()  # those that follow a death are new, too
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
    """Start the engines that all entry points share, from one call to the next."""
    how = Start.from_options(WORKERS, fault_tolerant=True)
    name = default_name(how)
    engines = LocalEngines(folder_of(name), name, how)
    engines.start()
    try:
        yield engines
    finally:
        engines.release()


def draw(number: int, lengths: Mapping[str, float]) -> tuple[str, int, Moment]:
    """Draw the entry point, the rank and the moment of a kill."""
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
    """Return the seconds of each phase in an undisturbed call on new engines."""
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
    """Begin a call in a thread, on engines that are complete."""
    if len(_ranks(engines)) < WORKERS:  # one was killed whose result was there
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
    """Kill a rank during one call; return its row."""
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
    # The call did not need a rank that had handed over its result before the kill. What a rank
    # reports may be seen only after its kill, so that the phase alone does not tell.
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
    except Exception as error:  # whatever it is, the run is lost: a row says so
        return Outcome(0, False, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _ranks(engines: LocalEngines) -> dict[int, psutil.Process]:
    """Return the processes of the ranks, found from outside."""
    lock, processes = str(engines.folder / "keeper.lock"), {}
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if variables.get(KEEPER) == lock and "OMPI_COMM_WORLD_RANK" in variables:
                processes[int(variables["OMPI_COMM_WORLD_RANK"])] = process
        except psutil.Error:  # it has ended, or is another user's
            continue
    return processes
