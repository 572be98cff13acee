"""Access to a cluster's last submitted run from another cell or another process.

A run that another process has submitted can be watched and stopped from here. Only the submitting
process writes the run's record. If that process ends before the ranks do, the ranks end, too, and
the run is interrupted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

from labkit.cluster.calls import RankError
from labkit.cluster.run_handle import READ_EVERY, RunHandle
from labkit.cluster.run_progress import Outline
from labkit.common.errors import LabkitError
from labkit.records import store
from labkit.records.run import Run
from labkit.records.stream import FOLDER

LAST = "last-run"  # file in a cluster's folder with the directory of the last submitted run
_handles: WeakValueDictionary[Path, RunHandle] = WeakValueDictionary()  # submitted by this process


class AttachedRun(RunHandle):
    """A RunHandle of a run that has ended or that another process has submitted."""

    def __init__(self, directory: Path, show: bool = False) -> None:
        record = store.read_json(directory / "experiment.json")
        # The handle reads only the record, because the experiment may hold functions that another
        # process has defined.
        clock = record.get("clock", "wall")
        outline = Outline(directory.name, record["workers"], record["epochs"], clock)
        super().__init__(outline, directory)
        _handles[directory] = self
        self.begin(show)

    def _watch(self) -> Iterator[None]:
        while store.read_status(self.directory)["state"] == "running":
            yield
            # The record is polled, because the other process cannot notify this one.
            time.sleep(READ_EVERY)

    def _finish(self) -> Run:
        run = Run(self.directory)
        # Rows that were not read before the stream's removal come from the record.
        counts = {rank: state.steps for rank, state in self.progress.ranks.items()}
        history = run.history.to_dict("records")
        rows = [row for row in history if row["step"] >= counts.get(int(row["rank"]), 0)]
        epochs = run.metrics.get("epochs", [])[len(self.epochs) :]
        with self._drawing:
            self._add([("step", row) for row in rows] + [("epoch", epoch) for epoch in epochs])
        status = run.status
        if status["state"] == "failed":
            raise RankError(str(status.get("cause")), status.get("rank"))
        return run

    def _release(self) -> None:
        # The submitting process may have died before it could remove the stream.
        shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def remember(folder: Path, live: RunHandle) -> None:
    """Remember the run that was submitted to the cluster of this folder."""
    _handles[live.directory] = live
    store.write_atomically(folder / LAST, str(live.directory))


def last_submitted(folder: Path, show: bool = False) -> RunHandle:
    """Return the handle of the run that was last submitted to the cluster of this folder.

    Raises:
        LabkitError: No run was submitted, or its directory is missing.
    """
    try:
        directory = Path((folder / LAST).read_text())
    except FileNotFoundError:
        raise LabkitError(
            f"no experiment was submitted to cluster {folder.name!r} yet: use submit(experiment)"
        ) from None
    # A run that this process has submitted keeps its handle, so that `stop` and `result` act on one
    # object.
    live = _handles.get(directory)
    if live is None:
        return AttachedRun(directory, show)
    if show:
        live.show()
    return live
