"""Runs for MLflow: parameters, metrics by step, tags, state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from labkit.common.errors import InvalidInput, LabkitError
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

Item = TypeVar("Item")
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # in one request, as MLflow's servers allow
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
    address = _address(place)
    try:
        client = mlflow.MlflowClient(tracking_uri=address)
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        return [_write(client, number, run) for run in found]
    except mlflow.MlflowException as error:
        raise LabkitError(f"MLflow at {place}: {error.message}") from error


def _address(place: Path | str) -> str:
    if "://" in str(place):
        return str(place)
    file = Path(place).resolve()
    if file.is_dir():
        raise InvalidInput(f"{place} is a folder: name a file, such as {Path(place) / 'mlflow.db'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{file}"


def _write(client: Any, experiment: str, run: Run) -> str:
    entities = optional("mlflow.entities", "mlflow")
    started, told = round(1000 * moment(run, "started")), tags(run)  # ms
    # A name alone is not enough: a run that was deleted and repeated has the same one.
    same = f"tags.`labkit.run` = '{told['labkit.run']}' and attributes.start_time = {started}"
    for there in client.search_runs([experiment], same):
        if there.info.status != "RUNNING":
            return str(there.info.run_id)
        client.delete_run(there.info.run_id)
    number = str(client.create_run(experiment, started, told, run.name).info.run_id)
    given = [entities.Param(name, str(value)) for name, value in parameters(run).items()]
    for some in _portions(given, MOST_PARAMETERS):
        client.log_batch(number, params=some)
    ended = round(1000 * moment(run, "ended"))
    measured = [entities.Metric(name, v, ended, 0) for name, v in results(run).items()]
    curves = [entities.Metric(p.name, p.value, round(1000 * p.time), p.step) for p in points(run)]
    for some in _portions([*measured, *curves], MOST_METRICS):
        client.log_batch(number, metrics=some)
    client.set_terminated(number, _STATES.get(run.status["state"], "RUNNING"), ended or None)
    return number


def _portions(items: list[Item], most: int) -> Iterator[list[Item]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]
