"""Test parameters in a notebook's help and in TAB completion, and scripts with cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from sample_runs import write_job

import labkit as lk
from labkit.cli.app import app
from labkit.common.errors import InvalidInput
from labkit.jobs import cells, parameters
from labkit.jobs.notebook import execute

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "says_its_parameters.ipynb"
SCRIPT = """\
# %% [markdown]
# What is x²?

# %% tags=["parameters"]
x: float = 2.0  # the number
kind: str = "a"

# %%
import labkit as lk

lk.log(square=x**2)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "square.py"
    path.write_text(SCRIPT)
    return path


def completed(*words: str) -> list[str]:
    """Return the completions that TAB offers for the last word."""
    shell = ShellComplete(app, {}, "labkit", "_LABKIT_COMPLETE")
    return [item.value for item in shell.get_completions([*words[:-1]], words[-1])]


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help_lists_the_parameters_with_type_default_and_comment(command: str) -> None:
    said = CliRunner().invoke(app, [command, str(NOTEBOOK), "--help"]).output
    assert "Parameters of the notebook" in said
    assert "count: int = 1" in said
    assert "how many" in said
    assert "label: str | None = null" in said
    alone = CliRunner().invoke(app, [command, "--help"]).output
    assert "Parameters of the notebook" not in alone


def test_help_of_what_is_no_notebook_is_one_line() -> None:
    Path("odd.ipynb").write_text("{")
    result = CliRunner().invoke(app, ["run", "odd.ipynb", "--help"])
    assert result.exit_code == 2
    assert "odd.ipynb is not a notebook" in result.output


def test_labs_help_is_labkits_own() -> None:
    result = CliRunner().invoke(app, ["lab", "--help"])
    assert result.exit_code == 0
    assert "Usage: app lab" in result.output
    assert "JupyterLab in the folder notebooks/" in result.output


def test_tab_completes_notebooks_parameters_and_choices() -> None:
    Path("notebooks").mkdir()
    Path("notebooks/tour.ipynb").write_bytes(NOTEBOOK.read_bytes())
    assert completed("run", "to") == ["notebooks/tour.ipynb"]
    assert completed("run", "note") == ["notebooks/"]
    given = ("run", "notebooks/tour.ipynb", "-p")
    assert completed(*given, "f") == ["fast"]
    assert completed(*given, "mode", "") == ["ring", "tree"]
    assert completed(*given, "fast", "t") == ["true"]
    assert completed("sweep", "notebooks/tour.ipynb", "w") == ["word="]


@pytest.mark.heavy  # jupytext looks for the program pandoc
def test_a_script_with_cells_is_a_notebook(script: Path) -> None:
    assert [cell.kind for cell in cells.read(script)] == ["markdown", "code", "code"]
    known = parameters.declared(script)
    assert (known["x"].default, known["x"].help) == (2.0, "the number")
    with pytest.raises(InvalidInput, match="x = 'much'"):
        parameters.validate_values(script, {"x": "much"})


@pytest.mark.heavy  # a job's process
def test_a_script_with_cells_runs_with_its_parameters(script: Path, tmp_path: Path) -> None:
    job = execute(script, {"x": "3"}, tmp_path / "runs")
    assert job.state == "completed", job.cause
    [run] = lk.load_runs(job.path)
    assert run.metrics["square"] == 9
    assert {k: v for k, v in run.experiment.items() if k != "notebook"} == {"x": 3, "kind": "a"}


@pytest.mark.slow
def test_scripts_with_cells_are_swept(script: Path) -> None:
    result = CliRunner().invoke(app, ["sweep", str(script), "x=1,2", "--jobs", "2"])
    assert result.exit_code == 0, result.output
    squares = [run.metrics["square"] for run in lk.load_runs("runs")]
    assert sorted(squares) == [1, 4]


def test_a_notebook_without_runs_has_a_report(tmp_path: Path) -> None:
    job = write_job(tmp_path / "runs")
    notebook = json.loads(NOTEBOOK.read_text())
    notebook["cells"][1]["outputs"] = [
        {"output_type": "stream", "name": "stdout", "text": "it says 42"}
    ]
    (job / "output.ipynb").write_text(json.dumps(notebook))
    result = CliRunner().invoke(app, ["report", str(job), "-o", "alone.html"])
    assert result.exit_code == 0, result.output
    page = Path("alone.html").read_text()
    assert "it says 42" in page
    assert "Reproduce" in page
    assert "labkit run" in page
    nothing = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert nothing.exit_code == 0  # a subfolder contains a notebook run
    (job / "output.ipynb").unlink()
    empty = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert (empty.exit_code, "no runs" in empty.output) == (1, True)
