"""The ways in which a user runs an experiment on ranks; each rank stores its records."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import cloudpickle
import nbformat
import yaml

from labkit.cluster import Cluster
from labkit.cluster.magic import run_cell
from labkit.cluster.start import TOLERANT
from labkit.common.errors import LabkitError
from labkit.experiment import Experiment
from labkit.records.folders import scan
from labkit.records.run import Run
from tests.acceptance.faults.claims import data
from tests.acceptance.ledger import SUFFIX, audit, read

if TYPE_CHECKING:
    import keras

WORKERS, ROWS, BATCH, EPOCHS = 3, 600, 24, 20
STEPS = ROWS // BATCH
TASK, RESULT = "task", "result"  # file names of a cell; results also have the process ID
LIMIT = 900.0  # timeout of one command, seconds
CELL = """
import json, os, pathlib, pickle
from labkit.communicator import world
from labkit.records.stream import Writer
from labkit.worker.work import work
folder = pathlib.Path({folder!r})
ranks = world(limit=60)
if ranks.rank == 0:  # what ranks have left before the cell runs again
    for path in (*folder.glob("*{suffix}"), *folder.glob("{result}*")):
        path.unlink()
ranks.barrier("an empty folder")
writer = Writer(folder / "live", ranks.rank, {{}})
result = work(ranks, pickle.loads((folder / {task!r}).read_bytes()), report=writer.write)
metrics = {{}} if result.whole is None else dict(result.whole.evaluation)
_ = (folder / f"{result}{{os.getpid()}}").write_text(json.dumps(metrics))
"""
NOTEBOOK = """
import pathlib, pickle
import labkit as lk
experiment = pickle.loads(pathlib.Path({file!r}).read_bytes())
with lk.Cluster(workers={workers}, fault_tolerant=True) as cluster:
    cluster.run(experiment)
"""


class Outcome(NamedTuple):
    """The result of an experiment that lost a rank.

    Attributes:
        faults: Number of faults in the record.
        exact: Whether each sample was used once per epoch, according to the remaining ledgers.
        why: Error message; "" if the experiment ended without an error.
    """

    faults: int
    exact: bool
    why: str = ""


def ledgers(folder: str) -> list[keras.callbacks.Callback]:
    """Return callbacks that record which samples a rank uses."""
    from tests.acceptance.sample_ledger import SampleLedger

    return [SampleLedger(folder)]


def question(folder: Path, number: int) -> Experiment:
    """Return a short training whose equivalence check has no stored result yet."""
    return Experiment(
        model="mlp",
        model_options={"widths": [16, 8]},
        dataset=data(ROWS),
        validation=data(200, seed=2),
        workers=WORKERS,
        batch_size=BATCH,
        epochs=EPOCHS,
        learning_rate=_rate(number),
        seed=number,
        callbacks=partial(ledgers, str(folder)),
    )


def submit(folder: Path, number: int) -> Outcome:
    """Run an experiment by `Cluster.submit` and `result`."""
    with Cluster(workers=WORKERS, fault_tolerant=True) as cluster:
        cluster.submit(question(folder, number)).result()
    return _of_record(folder)


def run(folder: Path, number: int) -> Outcome:
    """`Cluster.run`."""
    with Cluster(workers=WORKERS, fault_tolerant=True) as cluster:
        cluster.run(question(folder, number), show=False)
    return _of_record(folder)


def notebook(folder: Path, number: int) -> Outcome:
    """Run an experiment by `labkit run NOTEBOOK`."""
    (folder / TASK).write_bytes(cloudpickle.dumps(question(folder, number)))
    cell = NOTEBOOK.format(file=str(folder / TASK), workers=WORKERS)
    path = folder / "question.ipynb"
    path.write_text(nbformat.writes(_notebook(cell)))
    _command(["run", str(path), "--runs", str(folder / "runs")])
    return _of_record(folder)


def experiment(folder: Path, number: int) -> Outcome:
    """Run an experiment by `labkit run FILE.yaml`; its history replaces the ledger of callbacks."""
    fields = {
        "dataset": "synthetic",
        "dataset_options": {"rows": ROWS, "test_rows": 60},
        "model_options": {"widths": [16, 8]},
        "workers": WORKERS,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "learning_rate": _rate(number),
    }
    path = folder / "question.yaml"
    path.write_text(yaml.safe_dump(fields))
    _command(["run", str(path), "--runs", str(folder / "runs"), "--fault-tolerant"])
    return _of_record(folder, rows=True)


def cell(folder: Path, number: int) -> Outcome:
    """Run an experiment in a `%%ranks` cell that labkit may repeat."""
    (folder / TASK).write_bytes(cloudpickle.dumps(question(folder, number)))
    (folder / "live").mkdir()
    source = CELL.format(folder=str(folder), task=TASK, result=RESULT, suffix=SUFFIX)
    with (
        Cluster(workers=WORKERS, fault_tolerant=True) as cluster,
        redirect_stderr(io.StringIO()) as errors,
    ):
        run_cell(cluster, source, retries=1)
    results = len(list(folder.glob(f"{RESULT}*")))
    faults = errors.getvalue().count("died, so the cell runs again")
    return Outcome(faults, results == WORKERS and _is_exact(folder))


ENTRY_POINTS: dict[str, Callable[[Path, int], Outcome]] = {
    "submit": submit,
    "run": run,
    "labkit run FILE.yaml": experiment,
    "labkit run NOTEBOOK": notebook,
    "%%ranks": cell,
}


def _rate(number: int) -> float:
    return 0.1 + 1e-6 * (number + 1)


def _notebook(source: str) -> nbformat.NotebookNode:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    return book


def _command(words: list[str]) -> None:
    """Run a command of labkit; raise an error with its output if it fails."""
    command = [sys.executable, "-P", "-c", "from labkit.cli.app import app; app()", *words]
    variables = {name: value for name, value in os.environ.items() if name != TOLERANT}
    process = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if process.returncode:
        raise LabkitError(" ".join(f"{process.stdout} {process.stderr}".split())[-400:])


def _of_record(folder: Path, rows: bool = False) -> Outcome:
    (record,) = scan(folder / "runs").usable
    run = Run(record.path)
    if (state := run.status["state"]) != "completed":
        return Outcome(0, False, f"{state}: {run.status['cause']}")
    exact = _is_complete(run) if rows else _is_exact(folder)
    return Outcome(len(run.metrics["faults"]), exact)


def _is_exact(folder: Path) -> bool:
    return audit(read(folder), data(ROWS), STEPS, EPOCHS).is_exact


def _is_complete(run: Run) -> bool:
    """Return whether each step used all samples, as far as all ranks could report."""
    history = run.history
    if sorted(history["step"].unique()) != list(range(STEPS * EPOCHS)):
        return False
    ranks = history["ranks"].fillna(WORKERS) if "ranks" in history else WORKERS
    steps = history.assign(wanted=ranks).groupby("step")
    whole = steps.size() == steps["wanted"].min()
    return bool((steps["samples"].sum()[whole] == BATCH).all())
