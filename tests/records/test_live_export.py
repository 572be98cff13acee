"""Test that logging during a run writes the same values as an export after it."""

from __future__ import annotations

import importlib
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sample_runs import experiment, history, metrics, write_run

import labkit
from labkit.records import store
from labkit.records.export import points, results
from labkit.records.live_export import MlflowStore, RunForwarder, Store, TensorBoardStore
from labkit.records.run import Run
from labkit.records.store import this_process
from labkit.records.stream import FOLDER, StreamWriter

pytestmark = pytest.mark.heavy
Curves = dict[tuple[str, int], float]


@pytest.fixture(autouse=True)
def _extras() -> None:
    if "CI" not in os.environ:  # CI installs all extras
        for name in ("mlflow", "alembic", "tensorboard"):
            if not find_spec(name):  # find_spec avoids the slow import
                pytest.skip(f"{name} is not installed")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return MLflow's database, which is slow to create; each test has its own experiment in it."""
    return tmp_path_factory.mktemp("mlflow") / "live.db"


@pytest.fixture
def stores(place: Path, tmp_path: Path) -> list[Store]:
    return [MlflowStore(place, tmp_path.name), TensorBoardStore(tmp_path / "board")]


def client(place: Path) -> Any:
    return importlib.import_module("mlflow").MlflowClient(tracking_uri=f"sqlite:///{place}")


def kept(place: Path, experiment: str) -> list[Any]:
    """Return the runs of an experiment in MLflow."""
    asked = client(place)
    return list(asked.search_runs([asked.get_experiment_by_name(experiment).experiment_id]))


def in_mlflow(place: Path, run: Any) -> Curves:
    """Return every point of a run in MLflow, and check that each occurs once."""
    asked = client(place)
    names = asked.get_run(run.info.run_id).data.metrics
    found = [each for name in names for each in asked.get_metric_history(run.info.run_id, name)]
    curves = {(each.key, each.step): each.value for each in found}
    assert len(curves) == len(found)
    return curves


def recorded(run: Run) -> Curves:
    """Return the points and results that an export writes for a run."""
    curves = {(point.name, point.step): point.value for point in points(run)}
    return curves | {(name, 0): value for name, value in results(run).items()}


def in_tensorboard(folder: Path) -> Curves:
    """Return every point of an event file of TensorBoard, and check that each occurs once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), {"scalars": 0})
    read.Reload()
    found = [(name, Scalar) for name in read.Tags()["scalars"] for Scalar in read.Scalars(name)]
    curves = {(name, each.step): each.value for name, each in found}
    assert len(curves) == len(found)
    return curves


class Told:
    """A run of two ranks that writes its live rows when the test asks it to."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path = path
        path.mkdir(parents=True)
        store.start(path, experiment(seed=seed))
        (path / FOLDER).mkdir()
        self._ranks = [StreamWriter(path / FOLDER, rank, this_process()) for rank in range(2)]
        table = history(2, 3, seed=seed)
        self.rows = [
            {name: column[place].item() for name, column in table.items()}
            for place in range(len(table["step"]))
        ]
        self.metrics = metrics(2, 3)

    def tell(self, rank: int, first: int, last: int) -> None:
        rows = [r for r in self.rows if r["rank"] == rank and first <= r["step"] < last]
        self._ranks[rank].write("step", rows)

    def tell_epoch(self, number: int) -> None:
        self._ranks[0].write("epoch", [self.metrics["epochs"][number]])

    def end(self, rows: list[dict[str, Any]] | None = None) -> Run:
        store.finish(self.path, self.metrics, rows or self.rows)
        for file in (self.path / FOLDER).iterdir():
            file.unlink()
        (self.path / FOLDER).rmdir()
        return Run(self.path)


def test_one_run_for_two_ranks_grows_step_by_step_and_ends_as_its_record(
    tmp_path: Path, place: Path, stores: list[Store]
) -> None:
    runs = tmp_path / "runs"
    write_run(runs, name="before")
    told = Told(runs / "job" / "mine")
    follower = RunForwarder(runs, runs, stores, since=time.time())
    assert follower.forward()
    told.tell(0, 0, 12)
    told.tell(1, 0, 10)
    assert follower.forward()
    [run] = kept(place, tmp_path.name)
    assert run.info.status == "RUNNING"
    assert run.data.params["strategy.algorithm"] == "ring"
    # A step counts once both ranks have reported it.
    expected = {
        ("step/loss", step): pytest.approx(
            sum(row["loss"] for row in told.rows if row["step"] == step) / 2
        )
        for step in range(10)
    }
    board = tmp_path / "board" / "job" / "mine"
    for curves in (in_mlflow(place, run), in_tensorboard(board)):
        assert {key: v for key, v in curves.items() if key[0] == "step/loss"} == expected
    told.tell(0, 12, 40)
    told.tell(1, 10, 35)
    told.tell_epoch(0)
    assert follower.forward()
    whole = recorded(told.end())
    assert not follower.forward()
    assert not follower.forward()
    [run] = kept(place, tmp_path.name)
    assert run.info.status == "FINISHED"
    assert run.data.tags["labkit.state"] == "completed"
    assert in_mlflow(place, run) == pytest.approx(whole)
    assert in_tensorboard(board) == pytest.approx(whole, rel=1e-6)
    assert [path.parent for path in (tmp_path / "board").rglob("events*")] == [board]


def test_a_record_that_says_other_than_was_told_takes_its_place(
    tmp_path: Path, place: Path, stores: list[Store]
) -> None:
    told = Told(tmp_path / "runs" / "mine")
    early = told.metrics | {"test_accuracy": 0.01, "epochs": told.metrics["epochs"][:1]}
    store.write_results(told.path, early, told.rows[:2])  # as a logged run does while it continues
    follower = RunForwarder(tmp_path / "runs", tmp_path / "runs", stores, since=0)
    for rank in range(2):
        told.tell(rank, 0, 30)
    follower.forward()
    late = [row | {"loss": row["loss"] + 1} for row in told.rows]
    whole = recorded(told.end(late))
    follower.forward()
    [run] = kept(place, tmp_path.name)
    assert in_mlflow(place, run) == pytest.approx(whole)
    assert in_tensorboard(tmp_path / "board" / "mine") == pytest.approx(whole, rel=1e-6)


def test_seeds_lie_below_the_run_that_they_are_of(
    tmp_path: Path, place: Path, stores: list[Store]
) -> None:
    runs = tmp_path / "runs"
    top = runs / "mine"
    top.mkdir(parents=True)
    store.start(top, experiment(repeats=2))
    follower = RunForwarder(runs, runs, stores, since=0)
    for seed in range(2):
        told = Told(top / f"seed{seed}", seed)
        told.tell(0, 0, 5)
        told.tell(1, 0, 5)
        assert follower.forward()
        told.end()
    store.fail(top, "no power")
    assert not follower.forward()
    found = {run.info.run_name: run for run in kept(place, tmp_path.name)}
    assert {name: run.info.status for name, run in found.items()} == {
        "mine": "FAILED",
        "seed0": "FINISHED",
        "seed1": "FINISHED",
    }
    above = {run.data.tags.get("mlflow.parentRunId") for run in found.values()}
    assert above == {None, found["mine"].info.run_id}
    written = {path.parent for path in (tmp_path / "board").rglob("events*")}
    board = tmp_path / "board" / "mine"
    assert written == {board, board / "seed0", board / "seed1"}


def test_a_store_that_fails_is_told_once_and_leaves_the_other_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Told(tmp_path / "runs" / "mine")
    broken, sound = TensorBoardStore(tmp_path / "gone"), TensorBoardStore(tmp_path / "board")
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").touch()
    follower = RunForwarder(tmp_path / "runs", tmp_path / "runs", [broken, sound], since=0)
    follower.forward()
    told.end()
    follower.forward()
    said = capsys.readouterr().err
    assert said.count("later, run labkit compare to add the missing data") == 1
    assert ("step/loss", 59) in in_tensorboard(tmp_path / "board" / "mine")


def test_ranks_that_train_are_logged_as_their_record_says(
    tmp_path: Path, cluster: labkit.Cluster
) -> None:
    follower = RunForwarder(Path("runs"), Path("runs"), [TensorBoardStore(tmp_path / "board")], 0)
    live = cluster.submit(labkit.Experiment(dataset="digits", workers=2, epochs=3, batch_size=64))
    while not live.done():
        follower.forward()
        time.sleep(0.2)  # the ranks need the cores
    run = live.result()
    assert not follower.forward()
    whole = recorded(run)
    assert ("step/loss", int(run.history["step"].max())) in whole
    [events] = (tmp_path / "board").rglob("events*")
    assert in_tensorboard(events.parent) == pytest.approx(whole, rel=1e-6)
