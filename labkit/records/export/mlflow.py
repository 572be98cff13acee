"""Runs for MLflow: parameters, metrics by step, tags, state."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.optional import optional
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

Item = TypeVar("Item")
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # in one request, as MLflow's servers allow
LONGEST_NAME, LONGEST_VALUE = 250, 6000  # letters
_STATES = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED", "pruned": "KILLED"}


def to_mlflow(runs: Iterable[Run], place: Path | str, experiment: str = "labkit") -> list[str]:
    """Write runs into an MLflow store, one MLflow run each; their ids, in the same order.

    A run that the experiment has already, by its name and start, is left as it is there, unless it
    is not terminated, as after an export that broke off: then it is deleted and written again.

    Args:
        runs: finished ones, or such as failed.
        place: a tracking server's address (`http://…`), or a file (SQLite): MLflow reads
            folders no more.
        experiment: MLflow's name for the set of runs; made where it does not exist.

    Raises: InvalidInput, a folder; LabkitError, no runs, MLflow is not installed, or it refuses.
    """
    mlflow = optional("mlflow", "mlflow")
    found = at_least_one(runs)
    try:
        store = MlflowStore(place, experiment)
        return [store.write(run) for run in found]
    except mlflow.MlflowException as error:
        raise LabkitError(f"MLflow at {place}: {error.message}") from error


class MlflowStore:
    """A set of runs that MLflow keeps; the arguments are those of `to_mlflow`.

    Raises: InvalidInput, a folder; LabkitError, MLflow is not installed, or it refuses.
    """

    def __init__(self, place: Path | str, experiment: str = "labkit") -> None:
        mlflow = optional("mlflow", "mlflow")
        self.place = f"MLflow at {place}"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=_address(place))
            known = self._client.get_experiment_by_name(experiment)
            self._experiment = (
                known.experiment_id if known else self._client.create_experiment(experiment)
            )
        except mlflow.MlflowException as error:
            raise LabkitError(f"{self.place}: {error.message}") from error

    def write(self, run: Run) -> str:
        """A whole run; its id."""
        for there in self._same(run):
            if there.info.status != "RUNNING":
                return str(there.info.run_id)
        log = self.begin(run)
        log.end(run, points(run))
        return log.number

    def begin(self, run: Run, folder: str = "", parent: MlflowLog | None = None) -> MlflowLog:
        """A run that is to be written, below another one where that has a parent.

        What an earlier attempt at it has left is deleted; `folder` is of no use here.
        """
        for there in self._same(run):
            self._client.delete_run(there.info.run_id)
        told = _tags(run) | ({"mlflow.parentRunId": parent.number} if parent else {})
        made = self._client.create_run(self._experiment, _started(run), told, run.name)
        return MlflowLog(self._client, str(made.info.run_id), run)

    def _same(self, run: Run) -> list[Any]:
        # A name alone is not enough: a run that was deleted and repeated has the same one.
        name, started = tags(run)["labkit.run"], _started(run)
        same = f"tags.`labkit.run` = '{name}' and attributes.start_time = {started}"
        return list(self._client.search_runs([self._experiment], same))


class MlflowLog:
    """A run that is being written."""

    def __init__(self, client: Any, number: str, run: Run) -> None:
        self._client, self.number = client, number
        self._entities = entities = optional("mlflow.entities", "mlflow")
        self._names: dict[str, str] = {}  # as MLflow allows them
        given = [
            entities.Param(self._allowed(name), str(value)[:LONGEST_VALUE])
            for name, value in parameters(run).items()
        ]
        for some in _portions(given, MOST_PARAMETERS):
            client.log_batch(number, params=some)

    def add(self, curves: Iterable[Point]) -> None:
        """Write points of curves."""
        metric = self._entities.Metric
        found = [
            metric(self._allowed(p.name), p.value, round(1000 * p.time), p.step) for p in curves
        ]
        for some in _portions(found, MOST_METRICS):
            self._client.log_batch(self.number, metrics=some)

    def _allowed(self, name: str) -> str:
        """A name that MLflow takes, and that no other of this run has become."""
        if name not in self._names:
            found, taken = allowed(name), set(self._names.values())
            while found in taken:
                found = f"{found[: LONGEST_NAME - 1]}_"
            self._names[name] = found
        return self._names[name]

    def end(self, run: Run, rest: Iterable[Point]) -> None:
        """Write what is missing of its curves, what came out, and how it ended."""
        ended = moment(run, "ended")
        self.add([Point(name, 0, ended, value) for name, value in results(run).items()])
        self.add(rest)
        told = [self._entities.RunTag(name, value) for name, value in _tags(run).items()]
        self._client.log_batch(self.number, tags=told)
        state = _STATES.get(run.status["state"], "RUNNING")
        self._client.set_terminated(self.number, state, round(1000 * ended) or None)


def _tags(run: Run) -> dict[str, str]:
    return {name: value[:LONGEST_VALUE] for name, value in tags(run).items()}


def allowed(name: str) -> str:
    """A name as MLflow has them, of letters, digits, `_`, `-`, `.`, blanks, and `/` between."""
    parts = re.sub(r"[^\w.\- /]", "_", name).split("/")
    whole = "/".join(part for part in parts if part not in ("", ".", ".."))
    return whole[:LONGEST_NAME].rstrip("/") or "_"


def _address(place: Path | str) -> str:
    if "://" in str(place):
        return str(place)
    file = Path(place).resolve()
    if file.is_dir():
        raise InvalidInput(f"{place} is a folder: name a file, such as {Path(place) / 'mlflow.db'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{file}"


def _started(run: Run) -> int:
    """Milliseconds since 1970."""
    return round(1000 * moment(run, "started"))


def _portions(items: list[Item], most: int) -> Iterator[list[Item]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]
