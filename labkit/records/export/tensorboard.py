"""Runs for TensorBoard: scalars by step, hyperparameters with results, tags as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from labkit.common.optional import optional
from labkit.records.export.told import (
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
        own = Path(folder) / name
        own.mkdir(parents=True, exist_ok=True)
        write_atomically(own / FILE, _records(run))
    return Path(folder)


def _names(runs: list[Run]) -> list[str]:
    """Names of runs; those of one name get so many folders in front as tell them apart."""
    paths = [run.path.resolve() for run in runs]

    def name(path: Path, parts: int = 1) -> str:
        alike = [other for other in paths if other.parts[-parts:] == path.parts[-parts:]]
        return "/".join(path.parts[-parts:]) if len(set(alike)) == 1 else name(path, parts + 1)

    return [name(path) for path in paths]


def _records(run: Run) -> bytes:
    """The event file: each event as a record with its length and checksums."""
    writer_module = optional("tensorboard.summary.writer.record_writer", "tensorboard")
    content = BytesIO()
    writer = writer_module.RecordWriter(content)
    for event in _events(run):
        writer.write(event.SerializeToString())
    return content.getvalue()


def _events(run: Run) -> Iterator[Any]:
    summaries = optional("tensorboard.compat.proto.summary_pb2", "tensorboard")
    hparams = optional("tensorboard.plugins.hparams.summary_v2", "tensorboard")
    text = optional("tensorboard.plugins.text.summary_v2", "tensorboard")
    event = optional("tensorboard.compat.proto.event_pb2", "tensorboard").Event
    started, ended = moment(run, "started"), moment(run, "ended")

    def scalar(name: str, value: float) -> Any:
        return summaries.Summary(value=[summaries.Summary.Value(tag=name, simple_value=value)])

    # TensorBoard reads no file that does not begin with its version.
    yield event(wall_time=started, file_version="brain.Event:2")
    given = hparams.hparams_pb(parameters(run), start_time_secs=started)
    yield event(wall_time=started, summary=given)
    for name, told in tags(run).items():
        yield event(wall_time=started, summary=text.text_pb(name, told))
    for point in points(run):
        summary = scalar(point.name, point.value)
        yield event(wall_time=point.time, step=point.step, summary=summary)
    for name, value in results(run).items():
        yield event(wall_time=ended, summary=scalar(name, value))
