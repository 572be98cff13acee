"""Test that the code in README and in the page about W&B works as written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import labkit
from labkit.jobs.notebook import execute
from labkit.records.run import load_runs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
# The pattern finds files that README refers to, except files that a contributor will write.
SENT_TO = re.compile(r"`((?:labkit|tests|notebooks|data)/[\w./]+)`")
YET_TO_WRITE = re.compile(r"NAME|schedules/chain\.py")


def own_model_and_arrays() -> str:
    """Return the README cell that uses a user's own model and arrays."""
    [found] = [code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "ask =" in code]
    return found


def test_readme_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 150


def test_own_model_and_arrays_take_fewer_than_15_lines() -> None:
    assert sum(bool(line) for line in own_model_and_arrays().splitlines()) < 15


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "labkit/README.md"])
def test_files_that_documents_name_are_there(document: str) -> None:
    named = SENT_TO.findall((ROOT / document).read_text())
    assert [path for path in named if not YET_TO_WRITE.search(path)] != []
    for path in named:
        assert YET_TO_WRITE.search(path) or (ROOT / path).exists(), path


def test_the_map_of_the_house_names_every_room_and_only_files_that_are_there() -> None:
    text = (ROOT / "labkit" / "README.md").read_text()
    rooms = {path.name for path in (ROOT / "labkit").iterdir() if (path / "__init__.py").exists()}
    named = {name for cell in re.findall(r"^\| (`.*?) \|", text, re.M) for name in cell.split(", ")}
    assert {name.strip("`") for name in named} == rooms
    for path in re.findall(r"`(\w+/[\w/]+\.py)`", text):
        assert (ROOT / path).exists() or (ROOT / "labkit" / path).exists(), path


# This offline stand-in has the W&B functions that the guide calls, and records the calls.
WANDB = """
import json
import os
import keras

def init(**given):
    tell("init", given)

def finish():
    tell("finish", {})

def tell(what, told):
    with open("told.jsonl", "a") as file:
        file.write(json.dumps([what, os.getpid(), told], default=float) + "\\n")

class WandbMetricsLogger(keras.callbacks.Callback):
    def __init__(self, log_freq):
        super().__init__()
        assert log_freq == "batch"

    def on_train_batch_end(self, batch, logs=None):
        tell("batch", logs)

    def on_epoch_end(self, epoch, logs=None):
        tell("epoch", logs)
"""


def test_a_callback_of_ones_own_hears_each_step_and_epoch_of_one_rank(
    cluster: labkit.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "notebooks/guide/howto/export.md").read_text()
    [code] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "wandb" in code]
    monkeypatch.syspath_prepend(Path.cwd())  # as in the kernel of a notebook in this folder
    Path("wandb").mkdir()
    Path("wandb/__init__.py").write_text(WANDB)
    Path("wandb/integration").mkdir()
    Path("wandb/integration/__init__.py").touch()
    Path("wandb/integration/keras.py").write_text("from wandb import WandbMetricsLogger\n")
    experiment = labkit.Experiment(dataset="digits", workers=2, epochs=2, batch_size=256)
    exec(compile(code, "export.md", "exec"), {"cluster": cluster, "experiment": experiment})
    told = [json.loads(line) for line in Path("told.jsonl").read_text().splitlines()]
    assert len({process for _, process, _ in told}) == 1
    assert [what for what, *_ in told][:: len(told) - 1] == ["init", "finish"]
    [run] = load_runs()
    losses = [logs for what, _, logs in told if what == "batch"]
    assert len(losses) == run.history["step"].nunique()
    assert all(logs["loss"] > 0 for logs in losses)
    epochs = [logs for what, _, logs in told if what == "epoch"]
    for logs, row in zip(epochs, run.metrics["epochs"], strict=True):
        assert logs == {name: row[name] for name in logs}
        assert {"loss", "val_loss"} <= logs.keys()


@pytest.mark.slow
def test_own_model_and_arrays_become_a_comparison_of_four_strategies_and_a_report() -> None:
    cell = {
        "cell_type": "code",
        "id": "mine",
        "metadata": {},
        "execution_count": None,
        "outputs": [],
        "source": own_model_and_arrays(),
    }
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    notebook = {"cells": [cell], "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    Path("mine.ipynb").write_text(json.dumps(notebook))
    job = execute(Path("mine.ipynb"))
    assert job.state == "completed", job.cause
    runs = load_runs(job.path)
    strategies = [run.experiment["strategy"]["name"] for run in runs]
    assert sorted(strategies) == ["AllReduce", "AllReduce", "Pipeline", "TensorParallel"]
    assert {run.metrics["equivalence"]["verdict"] for run in runs} == {"passed"}
    for run in runs:
        loss = run.history.groupby("step")["loss"].mean()
        assert loss.iloc[-1] < loss.iloc[0]
        assert run.metrics["test_accuracy"] > 0.2  # twice the accuracy of guessing among ten digits
    report = Path("report.html").read_text()
    assert all(run.name in report for run in runs)
    output = json.loads((job.path / "output.ipynb").read_text())["cells"][0]["outputs"][-1]
    assert output["data"]["application/vnd.plotly.v1+json"]["data"]
