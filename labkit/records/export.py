"""Exports of runs: to CSV or Parquet tables, to MLflow, and to TensorBoard."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeGuard, TypeVar

from labkit.common.canonical_json import JSON, is_number
from labkit.common.errors import InvalidInput, LabkitError, cannot_write
from labkit.common.files import make_folder, open_file
from labkit.common.imports import optional
from labkit.common.privacy import scrub
from labkit.common.terminal import plain
from labkit.records.run import Run, flatten, to_dataframe, verdict
from labkit.records.store import Record, write_atomically
from labkit.records.timed_steps import with_end_times

if TYPE_CHECKING:
    import pandas


STEP_CURVES = (
    "loss",
    "seconds",
    "compute_seconds",
    "communicate_seconds",
    "wait_seconds",
    "wire_bytes",
)


class Point(NamedTuple):
    """A point of a curve: the curve's name, step, time in seconds since 1970, and value."""

    name: str
    step: int
    time: float
    value: float


def require_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs as a list, or raise an error if there are none.

    Raises:
        LabkitError: If the argument contains no runs.
    """
    run_list = list(runs)
    if not run_list:
        raise LabkitError(
            "no runs to export; give runs, or a folder that contains runs (usually runs/)"
        )
    return run_list


def parameters(run: Run) -> dict[str, str | float | bool]:
    """Return a dict of a run's experiment fields, with dotted names such as `strategy.algorithm`.

    Names of machines and users are removed from the texts.
    """
    flat = flatten(run.experiment)
    return {
        name: value if isinstance(value, bool | int | float) else _text(value)
        for name, value in flat.items()
    }


def results(run: Run) -> dict[str, float]:
    """Return a dict of all finite metrics, with dotted names such as `step_ms.median`."""
    return {name: float(v) for name, v in flatten(run.metrics).items() if _is_finite(v)}


def tags(run: Run) -> dict[str, str]:
    """Return a run's tags: name, state, cause of failure, and verdict of verification."""
    status = run.status
    values = {"run": run.name, "state": status["state"], "equivalence": verdict(run)}
    values |= {"cause": status["cause"]} if status.get("cause") else {}
    return {f"labkit.{name}": _text(value) for name, value in values.items()}


def timestamp(run: Run, moment: str) -> float:
    """Return the time at which a run "started" or "ended", in s since 1970, or 0 if unknown."""
    timestamp = run.status.get(moment)
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def points(run: Run) -> Iterator[Point]:
    """Yield points of a run's curves: means over ranks and seeds, and metrics of each epoch."""
    begin = timestamp(run, "started")
    yield from step_points(run.history, begin)
    yield from epoch_points(run.metrics.get("epochs", []), begin)


def step_points(history: pandas.DataFrame, begin: float) -> Iterator[Point]:
    """Yield the points of curves by step; the run starts at `begin` (s since 1970)."""
    steps = with_end_times(history).groupby("step").mean(numeric_only=True)
    # The exported times exclude evaluations between epochs, because a history contains only the
    # durations of training steps.
    clock = begin + steps["ended"].fillna(0.0)
    for name in STEP_CURVES:
        for step, value in steps[name].dropna().items():
            yield Point(f"step/{name}", int(step), float(clock[step]), float(value))


def epoch_points(epochs: Iterable[Record], begin: float) -> Iterator[Point]:
    """Yield the points of metrics after each epoch; the run starts at `begin` (s since 1970)."""
    for row in epochs:
        for name, value in row.items():
            if name not in ("epoch", "step", "seconds") and _is_finite(value):
                time = begin + (row.get("seconds") or 0.0)
                yield Point(f"epoch/{name}", int(row["step"]), time, float(value))


def _text(value: JSON) -> str:
    return "none" if value is None else scrub(str(value))


def _is_finite(value: JSON) -> TypeGuard[float]:
    return is_number(value) and math.isfinite(value)


KINDS = (".csv", ".parquet")


def export(runs: Iterable[Run], path: Path | str, kind: str | None = None) -> Path:
    """Write a CSV or Parquet table with one row per run, and return the path of its file.

    The format is `kind` (".csv" or ".parquet"), or the suffix of the path if `kind` is None.

    The columns are those of `lk.to_dataframe`, with paths and machine names removed from the texts.
    A column with both texts and numbers is written as text, because Parquet columns have one type.

    Raises:
        InvalidInput: If the format of the file is neither CSV nor Parquet.
        LabkitError: If the argument contains no runs.
    """
    path = Path(path)
    kind = kind or path.suffix.lower()
    if kind not in KINDS:
        raise InvalidInput(f"{path.name} ends in neither {' nor '.join(KINDS)}: rename the file")
    table = export_table(runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".csv":
        texts = table.select_dtypes("string")
        table = table.assign(**{name: texts[name].map(_quoted) for name in texts})
        return write_atomically(path, table.rename(columns=_quoted).to_csv(index=False))
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return write_atomically(path, content.getvalue())


def export_table(runs: Iterable[Run]) -> pandas.DataFrame:
    """Return the table of `lk.to_dataframe`, with paths and machine names removed from its texts.

    Raises:
        LabkitError: If the argument contains no runs.
    """
    table = to_dataframe(require_runs(runs))
    return table.assign(**{name: _column(table[name]) for name in table.columns})


def _quoted(text: str) -> str:
    """Return a text, with a leading apostrophe if a spreadsheet would read it as a formula."""
    risky = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
    # The function `plain` escapes carriage returns. Pandas writes carriage returns without quotes,
    # and some programs read them as row ends.
    return plain(f"'{text}" if risky else text) if isinstance(text, str) else text


def _column(values: pandas.Series) -> pandas.Series:
    """Return a column with values of one type, without paths and machine names."""
    import pandas as pd

    present = values.dropna()
    kinds = {"number" if is_number(value) else type(value).__name__ for value in present}
    if kinds == {"number"}:
        return pd.to_numeric(values)
    if kinds == {"bool"}:
        return values.astype("boolean")
    # The function `scrub` runs only once per distinct text, because even a thousand runs contain
    # few different texts.
    text = {value: scrub(str(value)) for value in present.unique()}
    return values.map(text).astype("string")


Item = TypeVar("Item")
# MLflow accepts at most 1000 metrics and 100 parameters per request.
MAX_METRICS, MAX_PARAMETERS = 1000, 100
# MLflow accepts names of at most 250 characters, and values of at most 6000 characters.
MAX_NAME_LENGTH, MAX_VALUE_LENGTH = 250, 6000
_STATES = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "pruned": "KILLED"}


def to_mlflow(runs: Iterable[Run], place: Path | str, experiment: str = "labkit") -> list[str]:
    """Write each run to an MLflow store, and return the runs' MLflow ids in the same order.

    A run is not written twice to the same MLflow experiment. Two runs count as the same if they
    have equal names and start times. If an aborted export left an unfinished run in MLflow, labkit
    deletes the run and writes it again.

    Args:
        runs: Completed or failed runs.
        place: Address of a tracking server (`http://…`), or path of an SQLite file. MLflow no
            longer supports folders as stores.
        experiment: Name of the MLflow experiment, which is created if it does not exist.

    Raises:
        InvalidInput: If the argument `place` is the path of a folder.
        LabkitError: If there are no runs, if MLflow is not installed, or if MLflow reports an
            error.
    """
    mlflow = optional("mlflow")
    run_list = require_runs(runs)
    try:
        store = MlflowStore(place, experiment)
        return [store.write(run) for run in run_list]
    except mlflow.MlflowException as error:
        raise LabkitError(f"MLflow at {place}: {error.message}") from error


class MlflowStore:
    """An MLflow experiment that receives runs, with the same arguments as `to_mlflow`.

    Raises:
        InvalidInput: If the argument `place` is the path of a folder.
        LabkitError: If MLflow is not installed or reports an error.
    """

    def __init__(self, place: Path | str, experiment: str = "labkit") -> None:
        mlflow = optional("mlflow")
        self.place = f"MLflow at {place}"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=_address(place))
            existing = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                existing.experiment_id if existing else self._client.create_experiment(experiment)
            )
        except mlflow.MlflowException as error:
            raise LabkitError(f"{self.place}: {error.message}") from error

    def write(self, run: Run) -> str:
        """Write a complete run unless MLflow already has it, and return its MLflow id."""
        for existing in self._same(run):
            if existing.info.status != "RUNNING":
                return str(existing.info.run_id)
        log = self.begin(run)
        log.end(run, points(run))
        return log.number

    def begin(self, run: Run, folder: str = "", parent: MlflowLog | None = None) -> MlflowLog:
        """Create a run in MLflow, as a child of `parent` if it is given.

        If MLflow already contains an earlier export of the run, this export is deleted. The
        argument `folder` has no effect in MLflow.
        """
        for existing in self._same(run):
            self._client.delete_run(existing.info.run_id)
        run_tags = _tags(run) | ({"mlflow.parentRunId": parent.number} if parent else {})
        created = self._client.create_run(self._experiment, _started(run), run_tags, run.name)
        return MlflowLog(self._client, str(created.info.run_id), run)

    def _same(self, run: Run) -> list[Any]:
        # Runs are compared by name and start time. A new run may have the name of a deleted run.
        name, started = tags(run)["labkit.run"], _started(run)
        same = f"tags.`labkit.run` = '{name}' and attributes.start_time = {started}"
        return list(self._client.search_runs([self._experiment], same))


class MlflowLog:
    """The writer of a run's parameters, curves, results and tags to MLflow."""

    def __init__(self, client: Any, number: str, run: Run) -> None:
        self._client, self.number = client, number
        self._entities = entities = optional("mlflow.entities")
        # The dict `_names` maps each original name to the name that MLflow receives.
        self._names: dict[str, str] = {}
        params = [
            entities.Param(self._allowed(name), str(value)[:MAX_VALUE_LENGTH])
            for name, value in parameters(run).items()
        ]
        for batch in _batches(params, MAX_PARAMETERS):
            client.log_batch(number, params=batch)

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of the run's curves."""
        metric = self._entities.Metric
        metrics = [
            metric(self._allowed(p.name), p.value, round(1000 * p.time), p.step) for p in curves
        ]
        for batch in _batches(metrics, MAX_METRICS):
            self._client.log_batch(self.number, metrics=batch)

    def _allowed(self, name: str) -> str:
        """Return a name that MLflow allows and that is unique within the run."""
        if name not in self._names:
            candidate, used_names = allowed_name(name), set(self._names.values())
            while candidate in used_names:
                candidate = f"{candidate[: MAX_NAME_LENGTH - 1]}_"
            self._names[name] = candidate
        return self._names[name]

    def end(self, run: Run, remaining: Iterable[Point]) -> None:
        """Write the results, the remaining points of curves, and the final state of the run."""
        ended = timestamp(run, "ended")
        self.add([Point(name, 0, ended, value) for name, value in results(run).items()])
        self.add(remaining)
        run_tags = [self._entities.RunTag(name, value) for name, value in _tags(run).items()]
        self._client.log_batch(self.number, tags=run_tags)
        state = _STATES.get(run.status["state"], "RUNNING")
        self._client.set_terminated(self.number, state, round(1000 * ended) or None)


def _tags(run: Run) -> dict[str, str]:
    return {name: value[:MAX_VALUE_LENGTH] for name, value in tags(run).items()}


def allowed_name(name: str) -> str:
    """Return a name with only the characters that MLflow allows: letters, digits and `_-. /`."""
    parts = re.sub(r"[^\w.\- /]", "_", name).split("/")
    joined = "/".join(part for part in parts if part not in ("", ".", ".."))
    return joined[:MAX_NAME_LENGTH].rstrip("/") or "_"


def _address(place: Path | str) -> str:
    if "://" in str(place):
        return str(place)
    file = Path(place).resolve()
    if file.is_dir():
        raise InvalidInput(f"{place} is a folder: give a file, such as {Path(place) / 'mlflow.db'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{file}"


def _started(run: Run) -> int:
    """Return the start time of a run in milliseconds since 1970."""
    return round(1000 * timestamp(run, "started"))


def _batches(items: list[Item], size: int) -> Iterator[list[Item]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


FILE = "events.out.tfevents.labkit"  # TensorBoard reads only files whose names contain "tfevents".


def to_tensorboard(runs: Iterable[Run], folder: Path | str) -> Path:
    """Write runs for TensorBoard into a folder, with one event file per run.

    The command `tensorboard --logdir FOLDER` then shows curves under Scalars. TensorBoard shows
    parameters and results under HParams, and state and verdict under Text. Event files from earlier
    exports of the same runs are overwritten.

    Args:
        runs: Completed or failed runs.
        folder: Target folder, which is created if it does not exist.

    Raises:
        LabkitError: If the argument contains no runs, or if TensorBoard is not installed.
    """
    # The package `tensorboard` is imported first, so that an error message about a missing package
    # names TensorBoard.
    optional("tensorboard")
    run_list = require_runs(runs)
    for run, name in zip(run_list, _names(run_list), strict=True):
        run_folder, content = Path(folder) / name, BytesIO()
        make_folder(run_folder, folder)
        TensorBoardLog(run, content).end(run, points(run))
        write_atomically(run_folder / FILE, content.getvalue())
    return Path(folder)


def _names(runs: list[Run]) -> list[str]:
    """Return unique names for runs: folder names with as many parent folders as necessary."""
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
        optional("tensorboard")
        self.place, self._folder = f"TensorBoard's {folder}", Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(self._folder, error) from error

    def begin(self, run: Run, folder: str, parent: TensorBoardLog | None = None) -> TensorBoardLog:
        """Create a run's event file in a subfolder, which is inside the run's folder for a seed."""
        run_folder = self._folder / folder
        make_folder(run_folder, self._folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        return TensorBoardLog(
            run, os.fdopen(open_file(run_folder / FILE, flags, self._folder), "wb")
        )


class TensorBoardLog:
    """The writer of a run's event file, which stores each event with its length and checksums."""

    def __init__(self, run: Run, file: BinaryIO) -> None:
        module = optional("tensorboard.summary.writer.record_writer")
        self._summaries = optional("tensorboard.compat.proto.summary_pb2")
        self._event = optional("tensorboard.compat.proto.event_pb2").Event
        hparams = optional("tensorboard.plugins.hparams.summary_v2")
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
        text = optional("tensorboard.plugins.text.summary_v2")
        ended = timestamp(run, "ended")
        for name, value in tags(run).items():
            self._write(wall_time=ended, summary=text.text_pb(name, value))
        self.add(remaining)
        self.add([Point(name, 0, ended, value) for name, value in results(run).items()])
        if not isinstance(self._file, BytesIO):
            self._file.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(**fields).SerializeToString())


__all__ = ["KINDS", "export", "to_mlflow", "to_tensorboard"]
