"""Test that all notebooks keep one contract, also the one that `labkit new` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from notebook_contract import lessons_missing, violations

from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.jobs.notebook import execute
from labkit.jobs.parameters import declared, validate_values
from labkit.records.run import load_runs
from labkit.schedules import ALLREDUCE, PIPELINE

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def new(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["new", *arguments])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_keeps_the_contract(notebook: Path) -> None:
    assert violations(notebook) == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_teaches(notebook: Path) -> None:
    assert lessons_missing(notebook) == []


CHOICES = {
    ("collectives", "algorithm"): [*ALLREDUCE],
    ("scheduling", "algorithm"): [*ALLREDUCE, "mpi", "shared_memory", "auto"],
    ("scheduling", "schedules"): ["sequential", "overlap", "priority", "staggered"],
    ("pipeline", "schedules"): [*PIPELINE],
}


@pytest.mark.parametrize(("stem", "name"), CHOICES, ids=["-".join(pair) for pair in CHOICES])
def test_a_choice_is_refused_before_a_kernel_starts_and_offers_all(stem: str, name: str) -> None:
    notebook = next(path for path in NOTEBOOKS if path.stem == stem)
    parameter = declared(notebook)[name]
    for choice in CHOICES[stem, name]:
        value = [choice] if isinstance(parameter.default, list) else choice
        assert validate_values(notebook, {name: value}) == {name: value}
    with pytest.raises(InvalidInput, match="sideways") as caught:
        validate_values(notebook, {name: "sideways"})
    assert all(choice in str(caught.value) for choice in CHOICES[stem, name])


def test_a_new_notebook_keeps_the_contract_and_takes_its_parameters() -> None:
    result = new("mine", "--model", "cnn", "--dataset", "mnist", "--strategies", "Layerwise")
    assert (result.exit_code, result.stdout) == (
        0,
        "notebook: mine.ipynb; run it: labkit run mine.ipynb\n",
    )
    path = Path("mine.ipynb")
    assert violations(path) == []
    defaults = {name: parameter.default for name, parameter in declared(path).items()}
    assert (defaults["model"], defaults["dataset"]) == ("cnn", "mnist")
    assert defaults["strategy"] == ["Layerwise"]


def test_what_a_new_notebook_starts_with_is_possible() -> None:
    new("mine")
    given = {"strategy": '[TensorParallel, {"name": "AllReduce", "algorithm": "ring"}]'}
    assert validate_values(Path("mine.ipynb"), given)["strategy"][0] == "TensorParallel"


REFUSED = [
    ("collectives", "ranks_drawn", 13),
    ("collectives", "sizes", [0]),
    ("compression", "learning_rate", float("inf")),
    ("dataflow", "widths", [0]),
    ("dataflow", "parallel_calls", 0),
    ("model_compression", "repeats_timed", 0),
    ("model_parallel", "grid", [1]),
    ("model_parallel", "grid", [0, 2]),
    ("pipeline", "microbatches", [0]),
    ("pipeline", "virtual_stages_per_rank", 0),
    ("scheduling", "bucket_bytes", -1),
]


@pytest.mark.parametrize(("stem", "name", "value"), REFUSED)
def test_an_impossible_number_is_refused_before_a_kernel_starts(
    stem: str, name: str, value: Any
) -> None:
    notebook = next(path for path in NOTEBOOKS if path.stem == stem)
    with pytest.raises(InvalidInput, match=f"^{name}"):
        validate_values(notebook, {name: value})


NO_VALUE = "seed: int = len([])"
BREAKS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "does not begin with a question": lambda cells: cells.pop(0),
    "has no reading that is made": lambda cells: say(cells[9], "summarize", "table"),
    "has 0 readings tagged answer": lambda cells: cells[9].update(metadata={}),
    "has 0 cells tagged parameters": lambda cells: cells[1].update(metadata={}),
    "is no annotated assignment": lambda cells: say(cells[1], "workers: int =", "workers ="),
    "parameter workers has no comment": lambda cells: say(cells[1], "  # MPI ranks", ""),
    "parameter seed has a default that": lambda cells: say(cells[1], "seed: int = 0", NO_VALUE),
    "calls replace after a cluster": lambda cells: say(cells[2], "import", "lk.Cluster(); import"),
    "has stored outputs": lambda cells: cells[2].update(execution_count=1),
    "has a cell of 41 lines": lambda cells: cells[2].update(source=["pass\n"] * 41),
    "names a path of one machine": lambda cells: say(cells[2], "import", "'/srv/runs'; import"),
    "has cells without an id of their own": lambda cells: cells[2].pop("id"),
}


def say(cell: dict[str, Any], old: str, new: str) -> None:
    cell["source"] = [line.replace(old, new) for line in cell["source"]]


@pytest.mark.parametrize("broken", BREAKS)
def test_the_contract_says_what_breaks_it(broken: str) -> None:
    new("mine")
    path = Path("mine.ipynb")
    notebook = json.loads(path.read_text())
    BREAKS[broken](notebook["cells"])
    path.write_text(json.dumps(notebook))
    assert any(broken in violation for violation in violations(path)), violations(path)


def test_what_is_there_is_not_overwritten() -> None:
    Path("mine.ipynb").write_text("mine")
    for name in ("mine", "mine.ipynb"):
        result = new(name)
        assert (result.exit_code, result.stderr) == (
            2,
            "labkit: mine.ipynb already exists; give another name\n",
        )
    assert Path("mine.ipynb").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "mpl"], "unknown model 'mpl' (did you mean 'mlp'?)"),
        (["--dataset", "shakespeare"], "cannot predict the next character"),
        (["--strategies", "Pipelin"], "unknown strategy 'Pipelin' (did you mean 'Pipeline'?)"),
        (["--strategies", "{name: Pipeline, schedule: x}"], "schedule='x' is not known"),
        (["--strategies", "{a: "], "strategies = '{a: ' is not list[str | dict]"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_written(
    arguments: list[str], words: str
) -> None:
    result = new("mine", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("mine.ipynb").exists()


def test_a_folder_that_is_not_there_is_named() -> None:
    assert "nowhere/mine.ipynb cannot be written" in new("nowhere/mine").stderr


@pytest.mark.slow
def test_a_new_notebook_runs(tmp_path: Path) -> None:
    new("mine", "--strategies", "AllReduce, Pipeline")
    job = execute(Path("mine.ipynb"), {"epochs": 1}, tmp_path / "runs")
    assert job.state == "completed", job.cause
    runs = load_runs(job.path)
    assert [run.experiment["workers"] for run in runs] == [1, 2, 2]
    assert [run.metrics["equivalence"]["verdict"] for run in runs[1:]] == ["passed"] * 2
