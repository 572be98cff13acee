"""The package itself: light to import, its names the functions, and it travels to ranks."""

from __future__ import annotations

import subprocess
import sys

import cloudpickle
import pytest

import labkit as lk


def said(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = {"tensorflow", "mpi4py", "papermill", "nbconvert", "plotly", "pandas", "numpy"}
    assert (
        said(f"import sys, labkit, labkit.cli.app; print({heavy!r} & set(sys.modules))") == "set()"
    )


@pytest.mark.parametrize("first", ["labkit.records.run", "labkit.report", "labkit.jobs.form"])
def test_names_are_functions_whatever_module_was_loaded_before(first: str) -> None:
    program = f"import labkit as lk, {first}; print(lk.run.__name__, lk.report.__name__, "
    assert said(program + "lk.form.__name__, lk.Run.__name__)") == "run report form Run"


@pytest.mark.parametrize(
    "name", ["schedules.ALLREDUCE", "compression.COMPRESSORS", "export.export"]
)
def test_parts_are_there_from_the_start(name: str) -> None:
    assert said(f"import labkit; print(labkit.{name} is not None)") == "True"


def test_every_public_name_is_there() -> None:
    assert set(dir(lk)) >= {"Cluster", "Experiment", "Run", "compare", "report", "run"}
    for name in lk.__all__:
        assert getattr(lk, name) is not None


def test_a_function_that_names_it_travels() -> None:
    def work() -> object:
        return lk.Experiment

    assert cloudpickle.loads(cloudpickle.dumps(work))() is lk.Experiment
