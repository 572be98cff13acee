"""Runs for TensorBoard: scalars by step, hyperparameters with results, tags as text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from labkit.common.errors import cannot_write
from labkit.common.optional import optional
from labkit.common.safe_files import make_folder, open_file
from labkit.records.export.fields import (
    Point,
    at_least_one,
    moment,
    parameters,
    points,
    results,
    tags,
)
from labkit.records.run import Run
from labkit.records.store import write_atomically

FILE = "events.out.tfevents.labkit"  # the name by which TensorBoard knows what it may read


def to_tensorboard(runs: Iterable[Run], folder: Path | str) -> Path:
    """Write runs as TensorBoard reads them: below the folder one with an event file for each run.

    `tensorboard --logdir FOLDER` shows curves under Scalars, parameters beside results under
    HParams, state and verdict under Text. Runs exported before are written again in their place.

    Args:
        runs: finished ones, or such as failed.
        folder: made where it does not exist.

    Raises: LabkitError, no runs, or TensorBoard is not installed.
    """
    # First, so that who lacks it hears of that, and not of a module inside it.
    optional("tensorboard", "tensorboard")
    found = at_least_one(runs)
    for run, name in zip(found, _names(found), strict=True):
        own, content = Path(folder) / name, BytesIO()
        make_folder(own, folder)
        TensorBoardLog(run, content).end(run, points(run))
        write_atomically(own / FILE, content.getvalue())
    return Path(folder)


def _names(runs: list[Run]) -> list[str]:
    """Names of runs; those of one name get so many folders in front as tell them apart."""
    paths = [run.path.resolve() for run in runs]

    def name(path: Path, parts: int = 1) -> str:
        alike = [other for other in paths if other.parts[-parts:] == path.parts[-parts:]]
        return "/".join(path.parts[-parts:]) if len(set(alike)) == 1 else name(path, parts + 1)

    return [name(path) for path in paths]


class TensorBoardStore:
    """A folder that TensorBoard reads, for runs that are written while they go on.

    Raises: LabkitError, TensorBoard is not installed, or the folder cannot be made.
    """

    def __init__(self, folder: Path | str) -> None:
        optional("tensorboard", "tensorboard")
        self.place, self._folder = f"TensorBoard's {folder}", Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def begin(self, run: Run, folder: str, parent: TensorBoardLog | None = None) -> TensorBoardLog:
        """A run that is to be written into this folder below; a parent is in its path."""
        own = self._folder / folder
        make_folder(own, self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return TensorBoardLog(run, os.fdopen(open_file(own / FILE, flags, self._folder), "wb"))


class TensorBoardLog:
    """The event file of a run: each event as a record with its length and checksums."""

    def __init__(self, run: Run, file: BinaryIO) -> None:
        module = optional("tensorboard.summary.writer.record_writer", "tensorboard")
        self._summaries = optional("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._event = optional("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        hparams = optional("tensorboard.plugins.hparams.summary_v2", "tensorboard")
        self._file, self._writer = file, module.RecordWriter(file)
        started = moment(run, "started")
        # TensorBoard reads no file that does not begin with its version.
        self._write(wall_time=started, file_version="brain.Event:2")
        given = hparams.hparams_pb(parameters(run), start_time_secs=started)
        self._write(wall_time=started, summary=given)
        file.flush()

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of curves."""
        for point in curves:
            value = self._summaries.Summary.Value(tag=point.name, simple_value=point.value)
            summary = self._summaries.Summary(value=[value])
            self._write(wall_time=point.time, step=point.step, summary=summary)
        self._file.flush()

    def end(self, run: Run, rest: Iterable[Point]) -> None:
        """Write what is missing of its curves, what came out, and how it ended."""
        text = optional("tensorboard.plugins.text.summary_v2", "tensorboard")
        ended = moment(run, "ended")
        for name, told in tags(run).items():
            self._write(wall_time=ended, summary=text.text_pb(name, told))
        self.add(rest)
        self.add([Point(name, 0, ended, value) for name, value in results(run).items()])
        if not isinstance(self._file, BytesIO):
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(**fields).SerializeToString())
