"""Export of runs to MLflow: parameters, metrics by step, tags and states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.optional import optional
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

Item = TypeVar("Item")
MAX_METRICS, MAX_PARAMETERS = 1000, 100  # maximum numbers per request to an MLflow server
MAX_NAME_LENGTH, MAX_VALUE_LENGTH = 250, 6000  # maximum numbers of characters in names and values
_STATES = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "pruned": "KILLED"}


def to_mlflow(runs: Iterable[Run], place: Path | str, experiment: str = "labkit") -> list[str]:
    """Write each run to an MLflow store, and return the runs' MLflow ids in the same order.

    If the MLflow experiment already contains a run with the same name and start, the run is not
    written again. If the run in MLflow is not terminated, for example after an aborted export, it
    is deleted and written again.

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
    mlflow = optional("mlflow", "mlflow")
    run_list = require_runs(runs)
    try:
        store = MlflowStore(place, experiment)
        return [store.write(run) for run in run_list]
    except mlflow.MlflowException as error:
        raise LabkitError(f"MLflow at {place}: {error.message}") from error


class MlflowStore:
    """An MLflow experiment that receives runs; the arguments are those of `to_mlflow`.

    Raises:
        InvalidInput: If the argument `place` is the path of a folder.
        LabkitError: If MLflow is not installed or reports an error.
    """

    def __init__(self, place: Path | str, experiment: str = "labkit") -> None:
        mlflow = optional("mlflow", "mlflow")
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
        """Write a complete run, unless MLflow already has it; return its MLflow id."""
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
        # The start time is compared, too, because a new run may have the name of a deleted run.
        name, started = tags(run)["labkit.run"], _started(run)
        same = f"tags.`labkit.run` = '{name}' and attributes.start_time = {started}"
        return list(self._client.search_runs([self._experiment], same))


class MlflowLog:
    """The writer of a run's parameters, curves, results and tags to MLflow."""

    def __init__(self, client: Any, number: str, run: Run) -> None:
        self._client, self.number = client, number
        self._entities = entities = optional("mlflow.entities", "mlflow")
        self._names: dict[str, str] = {}  # name that MLflow receives, by original name
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
        """Return the name that MLflow receives, which is allowed and unique within this run."""
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
