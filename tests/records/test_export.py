"""Test that exports hold every run and number, and that other tools can read them."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from sample_runs import FAILED_GATE, write_run

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs.log import RunLog
from labkit.records import store
from labkit.records.export import export, to_mlflow, to_tensorboard
from labkit.records.run import Run


def mixed(root: Path) -> list[Run]:
    """Return runs whose parameters mix a word and a number, a path, a switch and None."""
    return [
        write_run(root, dataset="/home/alice/mnist.npz", limit="auto", fast=True),
        write_run(root, workers=4, limit=3, fast=False, learning_rate=None),
    ]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_was_written_is_read_again(tmp_path: Path, kind: str) -> None:
    path = export(mixed(tmp_path / "runs"), tmp_path / "new" / f"runs.{kind}")
    read = pd.read_csv(path) if kind == "csv" else pd.read_parquet(path)
    assert read["workers"].tolist() == [2, 4]
    assert read["limit"].tolist() == ["auto", "3"]
    assert read["fast"].tolist() == [True, False]
    assert read["step_ms.median"].tolist() == [5.0, 5.0]
    assert read["equivalence.verdict"].tolist() == ["passed", "passed"]
    assert read["learning_rate"].isna().tolist() == [False, True]
    assert "alice" not in path.read_bytes().decode(errors="replace")


def test_a_spreadsheet_takes_text_for_text(tmp_path: Path) -> None:
    formulas = ["=1+1", "+cmd", "-cmd", "@SUM(A1)", "\t=1", "\r=1"]
    runs = [write_run(tmp_path / "runs", name=f"r{k}", optimizer=f) for k, f in enumerate(formulas)]
    runs.append(write_run(tmp_path / "runs", name="plain", optimizer="sgd"))
    with export(runs, tmp_path / "t.csv").open(newline="") as file:
        told = [row["optimizer"] for row in csv.DictReader(file)]
    assert told == [*(f"'{formula}" for formula in formulas[:-1]), "'\\r=1", "sgd"]
    whole = pd.read_parquet(export(runs, tmp_path / "t.parquet"))
    assert list(whole["optimizer"]) == [*formulas, "sgd"]  # no spreadsheet opens Parquet files


def test_another_ending_and_no_runs_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"runs\.xlsx ends in neither"):
        export(mixed(tmp_path), tmp_path / "runs.xlsx")
    with pytest.raises(LabkitError, match="no runs to export"):
        export([], tmp_path / "runs.csv")
    assert not (tmp_path / "runs.csv").exists()


def test_the_command_writes_both(tmp_path: Path) -> None:
    mixed(tmp_path / "runs")
    arguments = ["compare", "runs", "--csv", "all.csv", "--parquet", "all.parquet"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "table: all.csv" in result.output
    assert len(pd.read_csv("all.csv")) == len(pd.read_parquet("all.parquet")) == 2


def tracked(root: Path) -> list[Run]:
    """Return a normal run, and a run with a path among its parameters and a failed gate."""
    return [
        write_run(root),
        write_run(
            root, workers=4, dataset="/home/alice/x.npz", measured={"equivalence": FAILED_GATE}
        ),
    ]


@pytest.mark.heavy
def test_tensorboards_own_reader_finds_curves_parameters_and_verdicts(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = tracked(tmp_path / "runs")
    to_tensorboard(runs, tmp_path / "board")
    folder = to_tensorboard(runs, tmp_path / "board")  # export again to the same folder
    assert sorted(path.name for path in folder.iterdir()) == sorted(run.name for run in runs)
    for run, gate in zip(runs, ("passed", "failed"), strict=True):
        read = EventAccumulator(str(folder / run.name), {"scalars": 0, "tensors": 0})
        read.Reload()
        losses = [event.value for event in read.Scalars("step/loss")]
        assert losses == pytest.approx(run.history.groupby("step")["loss"].mean().tolist())
        assert [event.step for event in read.Scalars("epoch/val_accuracy")] == [20, 40, 60]
        assert read.Scalars("step_ms.median")[0].value == 5.0
        [text] = read.Tensors("labkit.equivalence")
        assert text.tensor_proto.string_val[0].decode().startswith(gate)
    told = b"".join(path.read_bytes() for path in folder.rglob("events*"))
    assert b"strategy.algorithm" in told
    assert b"alice" not in told


@pytest.mark.slow
@pytest.mark.heavy
def test_mlflow_keeps_each_run_once_with_its_curves(tmp_path: Path) -> None:
    if "CI" not in os.environ:  # CI installs all extras
        pytest.importorskip("mlflow")
        pytest.importorskip("alembic")
    mlflow = importlib.import_module("mlflow")
    runs, place = tracked(tmp_path / "runs"), tmp_path / "mlflow.db"
    numbers = to_mlflow(runs, place)
    assert to_mlflow(runs, place) == numbers
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place}")
    kept = [client.get_run(number) for number in numbers]
    assert [each.info.run_name for each in kept] == [run.name for run in runs]
    assert [each.info.status for each in kept] == ["FINISHED", "FINISHED"]
    assert [each.data.tags["labkit.equivalence"].split()[0] for each in kept] == [
        "passed",
        "failed",
    ]
    assert kept[1].data.params["dataset"] == "~/x.npz"
    assert kept[0].data.metrics["step_ms.median"] == 5.0
    history = client.get_metric_history(numbers[0], "step/loss")
    losses = runs[0].history.groupby("step")["loss"].mean().tolist()
    assert [each.value for each in history] == pytest.approx(losses)
    client.update_run(numbers[1], "RUNNING")  # as after an export that broke off midway
    again = to_mlflow(runs, place)
    assert again[0] == numbers[0]
    assert again[1] != numbers[1]
    found = client.search_runs([kept[0].info.experiment_id])
    assert {each.info.run_id for each in found} == set(again)
    assert to_mlflow(runs, place) == again
    odd = RunLog(store.new_run_directory(tmp_path, "odd"), {"epochs (own)": [1], "a": "x" * 9000})
    odd.add({"F1 (macro)": [0.1, 0.2], "F1 [macro]": 0.3, "/top//5%": 0.4, "..": 0.5, "μ": 0.6})
    store.fail(odd.run.path, "no" * 9000)
    data = client.get_run(*to_mlflow([odd.run], place)).data
    assert data.params["epochs _own_"] == "[1]"
    told = {"F1 _macro_": 0.2, "F1 _macro__": 0.3, "top/5_": 0.4, "_": 0.5, "μ": 0.6}
    assert told.items() <= data.metrics.items()
    assert data.metrics["epoch/F1 _macro_"] == 0.2
    with pytest.raises(InvalidInput, match=r"give a file, such as .*mlflow\.db"):
        to_mlflow(runs, tmp_path)


@pytest.mark.parametrize(
    ("write", "name"), [(to_mlflow, "mlflow"), (to_tensorboard, "tensorboard")]
)
def test_a_tool_that_is_not_installed_is_a_line_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., Any], name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LabkitError, match=f"install it: uv sync --inexact --extra {name} "):
        write([write_run(tmp_path)], tmp_path / "store")
    assert not (tmp_path / "store").exists()
    arguments = ["compare", "mlp-digits-allreduce-w2", f"--{name}", "store"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"--extra {name}" in result.output


def test_runs_of_one_name_stay_apart_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    places = [tmp_path / sweep / "001_workers=1" for sweep in ("x-sweep", "x-sweep-2")]
    runs = [write_run(place) for place in places] + [write_run(tmp_path, "other")]
    folder = to_tensorboard(runs, tmp_path / "board")
    written = {str(path.parent.relative_to(folder)) for path in folder.rglob("events*")}
    name = runs[0].name
    assert written == {f"{p.parent.name}/{p.name}/{name}" for p in places} | {"other"}
