"""Export of active runs: a separate process forwards the ranks' messages to other tools.

No rank waits for a tool such as MLflow. A tool that hangs or fails therefore does not affect the
run.
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
from labkit.records.export import (
    MlflowStore,
    Point,
    TensorBoardStore,
    epoch_points,
    points,
    step_points,
    timestamp,
)
from labkit.records.folders import folders
from labkit.records.run import Run
from labkit.records.store import Record
from labkit.records.stream import FOLDER, StreamReader

POLL_INTERVAL = 1.0  # The export process reads the runs' new messages once per second.


class ExportLog(Protocol):
    """The writer of an active run's data to another tool."""

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of the run's curves to the other tool."""

    def end(self, run: Run, remaining: Iterable[Point]) -> None:
        """Write the remaining points, the results, and the final state of the run."""


class Store(Protocol):
    """The storage of another tool for runs; `place` is the name of the storage in messages."""

    place: str

    def begin(self, run: Run, folder: str, parent: Any = None) -> ExportLog:
        """Create a run in the storage, and replace an earlier export of the same run."""


class ForwardedRun:
    """An active run whose data are sent to one storage, where all its ranks appear as one run.

    Args:
        run: Run that is active or has recently ended.
        store: Storage of another tool, which receives the run's data.
        folder: Folder of the run, relative to the folder that contains all runs.
        parent: The log of the run with repeats, if this run is one of its seeds; otherwise None.
    """

    def __init__(self, run: Run, store: Store, folder: str, parent: ExportLog | None) -> None:
        self.run, self._store, self._place = run, store, (folder, parent)
        self.log = store.begin(run, *self._place)
        self._reader = StreamReader(run.path / FOLDER)
        self._sent: dict[tuple[str, int], float] = {}
        # The dict `_waiting` maps each step to the rows that are not yet exported.
        self._waiting: dict[int, list[Record]] = defaultdict(list)
        self._begin = self._clock = timestamp(run, "started")

    def forward(self, ended: bool) -> None:
        """Forward new messages of the ranks and, after the run has ended, all remaining data."""
        messages = self._reader.read()
        self._add(epoch_points((row for kind, row in messages if kind == "epoch"), self._begin))
        for kind, row in messages:
            if kind == "step":
                self._waiting[int(row["step"])].append(row)
        self._add(self._steps())
        if ended:
            self._end()

    def _steps(self) -> list[Point]:
        """Return the points of the waiting training steps that all ranks have reported."""
        import pandas as pd

        workers = self.run.experiment.get("workers")
        complete_steps = [step for step, rows in self._waiting.items() if len(rows) == workers]
        rows = [row for step in complete_steps for row in self._waiting.pop(step)]
        if not rows:
            return []
        step_points_ = list(step_points(pd.DataFrame(rows).assign(seed=0), self._clock))
        self._clock = max([self._clock, *(point.time for point in step_points_)])
        return step_points_

    def _add(self, curves: Iterable[Point]) -> None:
        # A point that is repeated with the same value, for example by `lk.log`, is exported only
        # once.
        new = {(p.name, p.step): p for p in curves if self._sent.get((p.name, p.step)) != p.value}
        if new:
            self.log.add(new.values())
            self._sent |= {key: point.value for key, point in new.items()}

    def _end(self) -> None:
        """Complete the exported run from its record, or export it again if a sent value was wrong.

        The values of asynchronous workers may be wrong at the time of sending. Only at the end does
        labkit know which steps all workers reached.
        """
        # A new `Run` object is needed, because a `Run` caches the content of its files.
        self.run = Run(self.run.path)
        recorded = {(point.name, point.step): point for point in points(self.run)}
        if recorded and any(
            key not in recorded or not math.isclose(recorded[key].value, value, rel_tol=1e-6)
            for key, value in self._sent.items()
        ):
            self._sent = {}
            self.log = self._store.begin(self.run, *self._place)
        rest = [point for key, point in recorded.items() if key not in self._sent]
        self.log.end(self.run, rest)


class RunForwarder:
    """A process that forwards all runs in a folder, and places seeds below their run with repeats.

    Args:
        folder: Folder that contains runs, jobs or a sweep.
        root: Folder that contains all runs; TensorBoard shows a run's path relative to this folder.
        stores: Storages of other tools, which receive the runs' data. If a storage fails, the
            failure is reported once, and this storage receives no more data.
        since: Time in seconds since 1970; runs that ended before this time are not forwarded.
    """

    def __init__(self, folder: Path, root: Path, stores: Sequence[Store], since: float) -> None:
        self._folder, self._root, self._since = folder, root, since
        self._stores = list(stores)
        self._followed: dict[Path, dict[str, ForwardedRun]] = {}
        self._over: set[Path] = set()

    def forward(self) -> bool:
        """Forward new messages of all runs, and return whether any run is still active."""
        if not self._folder.is_dir():
            return False
        tops = [Path(folder.path) for folder in folders(self._folder) if folder.is_run]
        active = [self._forward_run(top) for top in tops if top not in self._over]
        return any(active)

    def _forward_run(self, path: Path, parent: Path | None = None) -> bool:
        """Forward one run and its seeds, and return whether the run is still active."""
        run = Run(path)
        try:
            # The run's status is read before its messages, so that all messages of an ended run are
            # forwarded.
            status = run.status
            goes_on = status["state"] not in store.END_STATES
            if status["started"] is None or (not goes_on and timestamp(run, "ended") < self._since):
                return goes_on
        except (LabkitError, OSError):  # the run has only just started, is damaged, or was deleted
            return False
        for target in list(self._stores):
            try:
                self._pass_on(run, target, parent, not goes_on)
            except Exception as error:  # errors in other libraries must not end the export
                self._stores.remove(target)
                say(
                    f"labkit: {target.place}: {one_line(str(error)) or type(error).__name__}; "
                    "later, run labkit compare to add the missing data",
                    err=True,
                )
        # A run with repeats starts before the runs of its seeds, and ends after them.
        if parent is None:
            for seed in run.seeds:
                if seed.path not in self._over:
                    self._forward_run(seed.path, path)
        if not goes_on:
            self._over.add(path)
            self._followed.pop(path, None)
        return goes_on

    def _pass_on(self, run: Run, target: Store, parent: Path | None, ended: bool) -> None:
        logs = self._followed.setdefault(run.path, {})
        if target.place not in logs:
            parent_log = self._followed[parent][target.place].log if parent else None
            folder = os.path.relpath(run.path, self._root)
            logs[target.place] = ForwardedRun(run, target, folder, parent_log)
        logs[target.place].forward(ended)


def main(mlflow: str, tensorboard: str) -> int:
    """Forward the runs of a folder until standard input ends or delivers another line.

    The first line of standard input is a JSON object with `folder` and `root`.

    Args:
        mlflow: Address of an MLflow store, or "" if runs are not exported to MLflow.
        tensorboard: Folder for TensorBoard files, or "" if runs are not exported to TensorBoard.
    """
    # With its default settings, MLflow retries for minutes before it reports that a server is
    # missing.
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
        message = {"error": one_line(str(error)), "input": isinstance(error, InvalidInput)}
        print(json.dumps(message), flush=True)
        return 1
    print("{}", flush=True)
    if not (request := sys.stdin.readline()).startswith("{"):
        return 0
    record = json.loads(request)
    follower = RunForwarder(Path(record["folder"]), Path(record["root"]), stores, since)
    over = threading.Event()

    def wait() -> None:
        sys.stdin.readline()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not over.wait(POLL_INTERVAL):
        follower.forward()
    # If the parent process was killed, its runs will soon end, so they are forwarded until then.
    while follower.forward():
        time.sleep(POLL_INTERVAL)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
