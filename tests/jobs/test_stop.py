"""What runs is asked to end, cleans up, and says so; what labkit did not start is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from labkit.common.errors import LabkitError
from labkit.jobs.stop import stop
from labkit.records import store

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "is_interrupted.ipynb"


def test_a_job_is_interrupted_and_its_record_says_by_what() -> None:
    script = f"from labkit.jobs.notebook import execute; print(execute({str(NOTEBOOK)!r}).state)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    said: list[str] = []
    assert stop(Path("runs"), said.append) == []
    assert said == ["stopped: runs/is_interrupted/001"]
    assert child.communicate(timeout=120)[0] == "cleaned up\ninterrupted\n"
    status = store.read_status(Path("runs/is_interrupted/001"))
    assert (status["state"], status["cause"]) == (
        "interrupted",
        "ended by SIGTERM (labkit stop sends it)",
    )


def test_a_run_of_an_open_notebook_is_left_alone() -> None:
    run = store.new_run_directory("runs/interactive", "mlp")
    store.start(run, {"model": "mlp"})  # by this process
    said: list[str] = []
    stop(Path("runs"), said.append)
    assert said == ["nothing runs in runs"]


def test_a_record_that_cannot_be_read_is_left_alone() -> None:
    job = store.new_job_directory("runs", "a.ipynb", {})
    (job / "status.json").write_text("{")
    (job.parent / "sweep.json").write_text("{")
    assert stop(Path("runs"), print) == []


def test_no_folder_is_one_line() -> None:
    with pytest.raises(LabkitError, match="no folder nowhere"):
        stop(Path("nowhere"), print)
