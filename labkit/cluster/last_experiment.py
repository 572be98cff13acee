"""Access to the last run that was submitted to a cluster, from another cell or process.

A notebook or process can watch and stop a run that another process has submitted. Only the
submitting process writes the run's record. If the submitting process ends before the ranks do, the
ranks end, too, and the run counts as interrupted.
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

LAST = "last-run"  # file in a cluster's folder; contains the directory of the last submitted run
# `_handles` contains the handles of runs that this process has submitted.
_handles: WeakValueDictionary[Path, RunHandle] = WeakValueDictionary()


class AttachedRun(RunHandle):
    """A RunHandle of a run that has ended or that another process has submitted."""

    def __init__(self, directory: Path, show: bool = False) -> None:
        record = store.read_json(directory / "experiment.json")
        # The handle reads only the record, because the experiment may contain functions that are
        # defined in another process.
        clock = record.get("clock", "wall")
        outline = Outline(directory.name, record["workers"], record["epochs"], clock)
        super().__init__(outline, directory)
        _handles[directory] = self
        self.begin(show)

    def _watch(self) -> Iterator[None]:
        while store.read_status(self.directory)["state"] == "running":
            yield
            # The record is read repeatedly, because the submitting process cannot notify this
            # process.
            time.sleep(READ_EVERY)

    def _finish(self) -> Run:
        run = Run(self.directory)
        # The record contains all rows, also rows that this process had not read before the message
        # stream was removed.
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
        # If the submitting process has died, it could not remove the message stream.
        shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def remember(folder: Path, live: RunHandle) -> None:
    """Record the run as the last run that was submitted to the cluster in `folder`."""
    _handles[live.directory] = live
    store.write_atomically(folder / LAST, str(live.directory))


def last_submitted(folder: Path, show: bool = False) -> RunHandle:
    """Return the handle of the run that was last submitted to the cluster in `folder`.

    Raises:
        LabkitError: No run was submitted, or its directory is missing.
    """
    try:
        directory = Path((folder / LAST).read_text())
    except FileNotFoundError:
        raise LabkitError(
            f"no experiment was submitted to cluster {folder.name!r} yet: use submit(experiment)"
        ) from None
    # If this process has submitted the run, the existing handle is returned, so that `stop` and
    # `result` act on the same object.
    live = _handles.get(directory)
    if live is None:
        return AttachedRun(directory, show)
    if show:
        live.show()
    return live
