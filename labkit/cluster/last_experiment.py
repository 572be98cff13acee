"""The experiment that a cluster was given last, found again: from another cell, or another process.

What another process has submitted can be watched and stopped from here. Its record is that
process's to write: where it ends before the ranks do, they end too, and the run is interrupted.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

from labkit.cluster.calls import RankError
from labkit.cluster.live import READ_EVERY, Live
from labkit.cluster.run_progress import Outline
from labkit.common.errors import LabkitError
from labkit.records import store
from labkit.records.run import Run
from labkit.records.stream import FOLDER

LAST = "last-run"  # in a cluster's folder: where the run is that was submitted last
_OWN: WeakValueDictionary[Path, Live] = WeakValueDictionary()  # of this process


class Attached(Live):
    """A Live of what another process has submitted, or of what has ended."""

    def __init__(self, directory: Path, show: bool = False) -> None:
        record = store.read_json(directory / "experiment.json")
        # The record alone: the experiment itself may hold functions, which no other process has.
        clock = record.get("clock", "wall")
        outline = Outline(directory.name, record["workers"], record["epochs"], clock)
        super().__init__(outline, directory)
        _OWN[directory] = self
        self.begin(show)

    def _watch(self) -> Iterator[None]:
        while store.read_status(self.directory)["state"] == "running":
            yield
            # Polled: the end of another process's thread reaches nobody here but by the record.
            time.sleep(READ_EVERY)

    def _keep(self) -> Run:
        run = Run(self.directory)
        # What was not read before the stream was taken away stands in the record.
        seen = {rank: state.steps for rank, state in self.tally.ranks.items()}
        history = run.history.to_dict("records")
        rows = [row for row in history if row["step"] >= seen.get(int(row["rank"]), 0)]
        epochs = run.metrics.get("epochs", [])[len(self.epochs) :]
        with self._drawing:
            self._add([("step", row) for row in rows] + [("epoch", epoch) for epoch in epochs])
        status = run.status
        if status["state"] == "failed":
            raise RankError(str(status.get("cause")), status.get("rank"))
        return run

    def _close(self) -> None:
        # A process that is gone could not take it away itself.
        shutil.rmtree(self.directory / FOLDER, ignore_errors=True)


def note(folder: Path, live: Live) -> None:
    """Remember what was submitted to the cluster of this folder."""
    _OWN[live.directory] = live
    store.write_atomically(folder / LAST, str(live.directory))


def last(folder: Path, show: bool = False) -> Live:
    """What was submitted last to the cluster of this folder.

    Raises:
        LabkitError: nothing was, or its run directory is gone.
    """
    try:
        directory = Path((folder / LAST).read_text())
    except FileNotFoundError:
        raise LabkitError(
            f"nothing was submitted to cluster {folder.name!r} yet: use submit(experiment)"
        ) from None
    # Of this process: the very Live, whose `stop` and `result` are those that were given before.
    live = _OWN.get(directory)
    if live is None:
        return Attached(directory, show)
    if show:
        live.show()
    return live
