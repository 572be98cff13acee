"""Test that a form has a widget for each type, refuses as `labkit run` does, and runs notebooks."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import ipywidgets
import pytest

import labkit
from labkit.common.errors import InvalidInput
from labkit.jobs.form import Form, parameter_form

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"


def notebook(tmp_path: Path, cell: str, *cells: str) -> Path:
    """Return a notebook with this parameters cell, followed by other cells."""

    def code(number: int, source: str, *tags: str) -> dict[str, Any]:
        head = {"cell_type": "code", "id": f"c{number}", "metadata": {"tags": list(tags)}}
        return head | {"execution_count": None, "outputs": [], "source": source}

    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    content = {
        "cells": [code(0, cell, "parameters"), *(code(k, c) for k, c in enumerate(cells, 1))],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path / "asks.ipynb"
    path.write_text(json.dumps(content))
    return path


TYPES = """
fast: bool = True  # not slow
workers: int = 2  # <b>ranks</b>
learning_rate: float = 0.1
mode: Literal["tree", "ring"] = "ring"
title: str = "x"
sizes: list[int] = [1, 2]
network: str | None = None
model: str = "mlp"
half: float = 1 / 2
"""


def test_each_type_has_its_widget(tmp_path: Path) -> None:
    made = parameter_form(notebook(tmp_path, TYPES))
    kinds = {name: type(field.input) for name, field in made.fields.items()}
    assert kinds == {
        "fast": ipywidgets.Checkbox,
        "workers": ipywidgets.IntText,
        "learning_rate": ipywidgets.FloatText,
        "mode": ipywidgets.Dropdown,
        "title": ipywidgets.Text,
        "sizes": ipywidgets.Text,
        "network": ipywidgets.Combobox,
        "model": ipywidgets.Combobox,
        "half": ipywidgets.Text,
    }
    assert made.fields["mode"].input.options == ("tree", "ring")
    assert made.fields["sizes"].input.value == "[1, 2]"
    assert "1GbE" in made.fields["network"].input.options
    assert [field.input.description for field in made.fields.values()] == list(made.fields)
    help = made.fields["workers"].widget.children[0].children[1]
    assert help.value == "<small>&lt;b&gt;ranks&lt;/b&gt;</small>"
    assert labkit.parameter_form is parameter_form
    assert "\n" not in repr(made)


def test_only_what_was_changed_is_given_converted_to_its_type(tmp_path: Path) -> None:
    made = parameter_form(notebook(tmp_path, TYPES))
    assert made.values() == {}
    made.fields["fast"].input.value = False
    made.fields["sizes"].input.value = "4,5"
    made.fields["network"].input.value = "10GbE"
    made.fields["half"].input.value = "0.25"
    assert made.values() == {"fast": False, "sizes": [4, 5], "network": "10GbE", "half": 0.25}
    made.fields["fast"].input.value = True
    assert "fast" not in made.values()


def errors(made: Form) -> dict[str, str]:
    return {name: field.error for name, field in made.fields.items() if field.error}


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("sizes", "1,two", r"sizes = '1,two' is not list\[int\]; the notebook declares"),
        ("workers", 0, "workers=0 is impossible: input should be greater than 0"),
        ("learning_rate", -1.0, "learning_rate=-1.0 is impossible"),
        ("network", "2GbE", "no network is called '2GbE'"),
        ("model", "mlpp", "mlpp"),
    ],
)
def test_a_wrong_value_is_told_beside_its_field_and_starts_nothing(
    tmp_path: Path, name: str, value: Any, told: str
) -> None:
    made = parameter_form(notebook(tmp_path, TYPES))
    made.fields[name].input.value = value
    assert list(errors(made)) == [name]
    assert re.search(told, errors(made)[name])
    assert "\n" not in errors(made)[name]
    made.run.click()
    assert "not started" in made._status.value
    assert not Path("runs").exists()
    made.fields[name].input.value = made.fields[name]._initial
    assert errors(made) == {}


def test_an_error_is_text(tmp_path: Path) -> None:
    made = parameter_form(notebook(tmp_path, TYPES))
    made.fields["model"].input.value = "<script>"
    assert "<script" not in made.fields["model"].widget.children[1].value


def test_what_is_no_notebook_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no notebook"):
        parameter_form(tmp_path / "none.ipynb")
    with pytest.raises(InvalidInput, match="is not a type made of"):
        parameter_form(notebook(tmp_path, "x: Tensor = 1"))


@pytest.mark.slow
@pytest.mark.heavy
def test_it_runs_the_notebook_with_the_values_and_links_the_result(tmp_path: Path) -> None:
    path = notebook(tmp_path, "word: str = 'a'\nfast: bool = True", "print(word * 3, fast)")
    before = path.read_bytes()
    made = parameter_form(path)
    made.fields["word"].input.value = "xyz"
    made.run.click()
    made.run.click()  # a second click that was already sent before the button was disabled
    assert made.run.disabled
    result = made.wait()
    assert [job.name for job in Path("runs/asks").iterdir() if job.is_dir()] == ["001_word=xyz"]
    assert result is not None
    assert result.state == "completed", result.cause
    assert result.path == Path("runs/asks/001_word=xyz")
    cells = json.loads((result.path / "output.ipynb").read_text())["cells"]
    assert "xyzxyzxyz True" in json.dumps(cells)
    assert path.read_bytes() == before
    assert "completed" in made._status.value
    (link,) = made._links.outputs
    assert link["data"]["text/html"] == (
        '<a href="runs/asks/001_word%3Dxyz/output.ipynb">the executed notebook</a>'
    )
    assert (made.run.disabled, made.stop.disabled, made.report.disabled) == (False, True, False)
    made.report.click()
    assert "no report" in made._status.value or len(made._links.outputs) == 2


@pytest.mark.heavy
def test_the_stop_button_interrupts_the_cell(tmp_path: Path) -> None:
    cell = "open('started', 'w').close()\nimport time\ntime.sleep(300)"
    made = parameter_form(notebook(tmp_path, "x: int = 1", cell))
    made.run.click()
    end = time.monotonic() + 120
    while not Path("started").exists() and time.monotonic() < end:
        time.sleep(0.05)
    made.stop.click()
    result = made.wait()
    assert result is not None
    assert (result.state, result.cause) == ("interrupted", "interrupted by the user")
    assert "interrupted by the user" in made._status.value
    assert made.stop.description == "Stop notebook"


@pytest.mark.heavy
def test_a_job_that_can_be_followed_no_more_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/srv/lab/alice/output.ipynb")

    made = parameter_form(notebook(tmp_path, "x: int = 1", "import time\ntime.sleep(300)"))
    monkeypatch.setattr(made, "_progress", progress)
    made.run.click()
    assert made.wait() is None
    assert "interrupted: OSError: [Errno 28] No space left on device" in made._status.value
    assert "alice" not in made._status.value
    assert not made.run.disabled
    assert made._job is not None
    assert made._job.result().state == "interrupted"


def test_a_path_from_where_the_lab_was_started_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Test paths relative to where `labkit lab` started, besides the kernel's own folder."""
    (tmp_path / "notebooks").mkdir()
    notebook(tmp_path / "notebooks", TYPES)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setenv("LABKIT_RUNS", str(tmp_path / "runs"))
    assert parameter_form("asks.ipynb").notebook == Path("asks.ipynb")
    made = parameter_form("notebooks/asks.ipynb")
    assert (made.notebook, made.root) == (tmp_path / "notebooks/asks.ipynb", tmp_path / "runs")
    with pytest.raises(InvalidInput):
        parameter_form("notebooks/other.ipynb")
