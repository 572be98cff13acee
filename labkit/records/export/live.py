"""Runs for other tools while they go on: a process of its own passes on what ranks tell.

No rank waits for a tool, and one that hangs or is gone takes nothing from a run.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.terminal import one_line, say
from labkit.records import store
from labkit.records.export.fields import Point, epoch_points, moment, points, step_points
from labkit.records.export.mlflow import MlflowStore
from labkit.records.export.tensorboard import TensorBoardStore
from labkit.records.run import Run
from labkit.records.scan import folders
from labkit.records.store import Record
from labkit.records.stream import FOLDER, Reader

LOOK_EVERY = 1.0  # seconds


class Log(Protocol):
    """A run in another tool's store, while it is written."""

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of curves."""

    def end(self, run: Run, rest: Iterable[Point]) -> None:
        """Write what is missing of its curves, what came out, and how it ended."""


class Store(Protocol):
    """Where another tool keeps runs; `place` names it."""

    place: str

    def begin(self, run: Run, folder: str, parent: Any = None) -> Log:
        """A run that is to be written, anew where it is there already."""


class Followed:
    """A run that is passed on to one store: one there, of however many ranks.

    Args:
        run: that goes on, or has just ended.
        begin: makes its log, and makes it anew.
    """

    def __init__(self, run: Run, store: Store, folder: str, parent: Log | None) -> None:
        self.run, self._store, self._place = run, store, (folder, parent)
        self.log = store.begin(run, *self._place)
        self._reader = Reader(run.path / FOLDER)
        self._sent: dict[tuple[str, int], float] = {}
        self._waiting: dict[int, list[Record]] = defaultdict(list)  # rows of steps, by step
        self._begin = self._clock = moment(run, "started")

    def look(self, ended: bool) -> None:
        """Pass on what is new; what is still missing, of a run whose record says how it ended."""
        told = self._reader.read()
        self._add(epoch_points((row for kind, row in told if kind == "epoch"), self._begin))
        for kind, row in told:
            if kind == "step":
                self._waiting[int(row["step"])].append(row)
        self._add(self._steps())
        if ended:
            self._end()

    def _steps(self) -> list[Point]:
        """The points of steps that all ranks have told of."""
        import pandas as pd

        workers = self.run.experiment.get("workers")
        whole = [step for step, rows in self._waiting.items() if len(rows) == workers]
        rows = [row for step in whole for row in self._waiting.pop(step)]
        if not rows:
            return []
        found = list(step_points(pd.DataFrame(rows).assign(seed=0), self._clock))
        self._clock = max([self._clock, *(point.time for point in found)])
        return found

    def _add(self, curves: Iterable[Point]) -> None:
        # A point that is told twice, as those of `lk.log` are, is one.
        new = {(p.name, p.step): p for p in curves if self._sent.get((p.name, p.step)) != p.value}
        if new:
            self.log.add(new.values())
            self._sent |= {key: point.value for key, point in new.items()}

    def _end(self) -> None:
        """Complete it by its record; where that says other than was passed on, it is written anew.

        It does of workers that go at their own pace: a step of them all is known when all is over.
        """
        self.run = Run(self.run.path)  # a Run keeps what it has read of one that goes on
        whole = {(point.name, point.step): point for point in points(self.run)}
        if whole and any(
            key not in whole or not math.isclose(whole[key].value, value, rel_tol=1e-6)
            for key, value in self._sent.items()
        ):
            self._sent = {}
            self.log = self._store.begin(self.run, *self._place)
        rest = [point for key, point in whole.items() if key not in self._sent]
        self.log.end(self.run, rest)


class Follower:
    """Passes on the runs below a folder; those with seeds, and each of their seeds below them.

    Args:
        folder: of runs, jobs or a sweep.
        root: from which the names of folders count in stores that are folders.
        stores: to pass them on to; one that fails is told once, and left out from then on.
        since: seconds since 1970; runs that have ended before are left out.
    """

    def __init__(self, folder: Path, root: Path, stores: Sequence[Store], since: float) -> None:
        self._folder, self._root, self._since = folder, root, since
        self._stores = list(stores)
        self._followed: dict[Path, dict[str, Followed]] = {}
        self._over: set[Path] = set()

    def look(self) -> bool:
        """Pass on what is new; whether a run still goes on."""
        if not self._folder.is_dir():
            return False
        tops = [Path(folder.path) for folder in folders(self._folder) if folder.is_run]
        going = [self._look(top) for top in tops if top not in self._over]
        return any(going)

    def _look(self, path: Path, parent: Path | None = None) -> bool:
        """Of one run, with its seeds; whether it still goes on."""
        run = Run(path)
        try:
            # Once: what is told before the end stands in the record after it.
            status = run.status
            goes_on = status["state"] not in store.ENDED
            if status["started"] is None or (not goes_on and moment(run, "ended") < self._since):
                return goes_on
        except (LabkitError, OSError):  # it has just begun, is damaged, or is being removed
            return False
        for target in list(self._stores):
            try:
                self._pass_on(run, target, parent, not goes_on)
            except Exception as error:  # of another's library; a run goes on without it
                self._stores.remove(target)
                say(
                    f"labkit: {target.place}: {one_line(str(error)) or type(error).__name__}; "
                    "what is missing there, labkit compare adds",
                    err=True,
                )
        # Seeds come after the run that they are of, and end before it.
        if parent is None:
            for seed in run.seeds:
                if seed.path not in self._over:
                    self._look(seed.path, path)
        if not goes_on:
            self._over.add(path)
            self._followed.pop(path, None)
        return goes_on

    def _pass_on(self, run: Run, target: Store, parent: Path | None, ended: bool) -> None:
        own = self._followed.setdefault(run.path, {})
        if target.place not in own:
            above = self._followed[parent][target.place].log if parent else None
            folder = os.path.relpath(run.path, self._root)
            own[target.place] = Followed(run, target, folder, above)
        own[target.place].look(ended)


def main(mlflow: str, tensorboard: str) -> int:
    """Follow the folder that standard input names, until it says more or ends.

    Args:
        mlflow: MLflow's address, or nothing.
        tensorboard: TensorBoard's folder, or nothing.
    """
    # A server that is not there is told at once: MLflow would ask for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    since = time.time()
    stores: list[Store] = []
    try:
        if mlflow:
            stores.append(MlflowStore(mlflow))
        if tensorboard:
            stores.append(TensorBoardStore(tensorboard))
    except LabkitError as error:
        told = {"error": one_line(str(error)), "input": isinstance(error, InvalidInput)}
        print(json.dumps(told), flush=True)
        return 1
    print("{}", flush=True)
    if not (asked := sys.stdin.readline()).startswith("{"):
        return 0
    record = json.loads(asked)
    follower = Follower(Path(record["folder"]), Path(record["root"]), stores, since)
    over = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not over.wait(LOOK_EVERY):
        follower.look()
    # Who has asked may have been killed: then its runs are about to end, too.
    while follower.look():
        time.sleep(LOOK_EVERY)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
