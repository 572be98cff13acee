"""Export of runs to TensorBoard: scalars by step, parameters with results, and text tags."""

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
    parameters,
    points,
    require_runs,
    results,
    tags,
    timestamp,
)
from labkit.records.run import Run
from labkit.records.store import write_atomically

FILE = "events.out.tfevents.labkit"  # TensorBoard requires "tfevents" in the name


def to_tensorboard(runs: Iterable[Run], folder: Path | str) -> Path:
    """Write runs for TensorBoard into a folder, with one event file per run.

    `tensorboard --logdir FOLDER` then shows curves under Scalars, parameters and results under
    HParams, and state and verdict under Text. Event files from earlier exports of the same runs are
    overwritten.

    Args:
        runs: Completed or failed runs.
        folder: Target folder, which is created if it does not exist.

    Raises:
        LabkitError: If the argument contains no runs, or if TensorBoard is not installed.
    """
    # The package is imported first, so that the error message names TensorBoard and not one of its
    # modules.
    optional("tensorboard", "tensorboard")
    run_list = require_runs(runs)
    for run, name in zip(run_list, _names(run_list), strict=True):
        run_folder, content = Path(folder) / name, BytesIO()
        make_folder(run_folder, folder)
        TensorBoardLog(run, content).end(run, points(run))
        write_atomically(run_folder / FILE, content.getvalue())
    return Path(folder)


def _names(runs: list[Run]) -> list[str]:
    """Return unique names for runs: folder names, with as many parent folders as necessary."""
    paths = [run.path.resolve() for run in runs]

    def name(path: Path, parts: int = 1) -> str:
        same_suffix = [other for other in paths if other.parts[-parts:] == path.parts[-parts:]]
        return (
            "/".join(path.parts[-parts:]) if len(set(same_suffix)) == 1 else name(path, parts + 1)
        )

    return [name(path) for path in paths]


class TensorBoardStore:
    """A TensorBoard folder into which runs are written while they are active.

    Raises:
        LabkitError: If TensorBoard is not installed, or if the folder cannot be created.
    """

    def __init__(self, folder: Path | str) -> None:
        optional("tensorboard", "tensorboard")
        self.place, self._folder = f"TensorBoard's {folder}", Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def begin(self, run: Run, folder: str, parent: TensorBoardLog | None = None) -> TensorBoardLog:
        """Create a run's event file in a subfolder; a seed's path is below that of its run."""
        run_folder = self._folder / folder
        make_folder(run_folder, self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return TensorBoardLog(
            run, os.fdopen(open_file(run_folder / FILE, flags, self._folder), "wb")
        )


class TensorBoardLog:
    """The writer of a run's event file, which stores each event with its length and checksums."""

    def __init__(self, run: Run, file: BinaryIO) -> None:
        module = optional("tensorboard.summary.writer.record_writer", "tensorboard")
        self._summaries = optional("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._event = optional("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        hparams = optional("tensorboard.plugins.hparams.summary_v2", "tensorboard")
        self._file, self._writer = file, module.RecordWriter(file)
        started = timestamp(run, "started")
        # TensorBoard requires the file version in the first event.
        self._write(wall_time=started, file_version="brain.Event:2")
        hparams_summary = hparams.hparams_pb(parameters(run), start_time_secs=started)
        self._write(wall_time=started, summary=hparams_summary)
        file.flush()

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of the run's curves."""
        for point in curves:
            value = self._summaries.Summary.Value(tag=point.name, simple_value=point.value)
            summary = self._summaries.Summary(value=[value])
            self._write(wall_time=point.time, step=point.step, summary=summary)
        self._file.flush()

    def end(self, run: Run, remaining: Iterable[Point]) -> None:
        """Write the tags, the remaining points of curves and the results, and close the file."""
        text = optional("tensorboard.plugins.text.summary_v2", "tensorboard")
        ended = timestamp(run, "ended")
        for name, value in tags(run).items():
            self._write(wall_time=ended, summary=text.text_pb(name, value))
        self.add(remaining)
        self.add([Point(name, 0, ended, value) for name, value in results(run).items()])
        if not isinstance(self._file, BytesIO):
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(**fields).SerializeToString())
