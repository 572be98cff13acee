"""Test that a job runs in its own process with this interpreter and records what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from listening import watched

from labkit.common.errors import InvalidInput
from labkit.jobs.execution import ExecutionRecord
from labkit.jobs.job import cause
from labkit.jobs.notebook import JobResult, execute
from labkit.records import store

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
PATIENCE = 120.0  # seconds to wait for what takes one or two


def outputs(job: JobResult) -> list[dict[str, Any]]:
    cells = json.loads((job.path / "output.ipynb").read_text())["cells"]
    return [output for cell in cells for output in cell.get("outputs", [])]


def text(job: JobResult) -> str:
    return "".join("".join(o["text"]) for o in outputs(job) if o["output_type"] == "stream")


def run_script(tmp_path: Path, notebook: str) -> subprocess.Popen[str]:
    """Execute a notebook from another process that the test can send signals to."""
    script = f"from labkit.jobs.notebook import execute; execute({str(NOTEBOOKS / notebook)!r})"
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )


def wait_for_line(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    for found in child.stdout:
        if line in found:
            return
    pytest.fail(f"the notebook never said {line!r}")


def final_status(job: Path) -> dict[str, Any]:
    """Return the job's status after its process has ended."""
    limit = time.monotonic() + PATIENCE
    while (status := store.read_status(job))["state"] == "running" and time.monotonic() < limit:
        time.sleep(0.1)
    return status


def test_the_parameters_reach_the_notebook_with_their_types(tmp_path: Path) -> None:
    given = {"fast": "true", "sizes": "3,4", "rate": "1e-3", "mode": "tree", "word": "5"}
    job = execute(NOTEBOOKS / "says_its_parameters.ipynb", given, tmp_path)
    assert job.state == "completed"
    assert json.loads(text(job)) == [1, 0.001, True, "5", "tree", [3, 4], None]
    recorded = yaml.safe_load((job.path / "params.yaml").read_text())
    assert recorded == {"fast": True, "sizes": [3, 4], "rate": 0.001, "mode": "tree", "word": "5"}


def test_a_job_is_a_numbered_folder_that_leaves_the_notebook_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = NOTEBOOKS / "takes_no_parameters.ipynb"
    before = source.read_bytes()
    job = execute(source, root=tmp_path / "runs")
    assert job.path == tmp_path / "runs" / "takes_no_parameters" / "001"
    assert source.read_bytes() == before
    assert text(job) == "42\n"
    assert (job.path / "logs" / "notebook.log").read_text() == "42\n"
    assert capfd.readouterr().out == "42\n"  # and no messages of papermill


def test_a_failing_cell_is_named_and_everything_before_it_is_kept(tmp_path: Path) -> None:
    job = execute(NOTEBOOKS / "fails_in_its_second_cell.ipynb", {"value": 7}, tmp_path)
    # In [1] is the parameters cell, In [2] holds the injected values, and In [3] prints.
    assert job.state == "failed"
    assert job.cause == "cell In [4]: ValueError: no use for 7 and a second line"
    assert job.rank is None
    assert text(job) == "before\n"
    status = store.read_status(job.path)
    assert (status["state"], status["cause"]) == ("failed", job.cause)
    assert status["started"] < status["ended"]


@pytest.mark.slow
def test_the_rank_that_an_exception_names_is_recorded(tmp_path: Path) -> None:
    with watched() as open_to_others:
        job = execute(NOTEBOOKS / "fails_on_rank_1.ipynb", {}, tmp_path)
    assert (job.state, job.rank) == ("failed", 1)
    assert open_to_others == set()
    assert store.read_status(job.path)["rank"] == 1


@pytest.mark.slow
def test_a_kernel_that_dies_has_not_completed(tmp_path: Path) -> None:
    job = execute(NOTEBOOKS / "its_kernel_dies.ipynb", {}, tmp_path)
    assert job.state == "failed"
    assert job.cause == "the kernel ended with code 3"


@pytest.mark.slow
def test_no_output_of_a_chatty_cell_is_lost(tmp_path: Path) -> None:
    job = execute(NOTEBOOKS / "writes_a_lot.ipynb", {"lines": 4000}, tmp_path)
    assert job.state == "completed"
    assert ["".join(o["data"]["text/plain"]) for o in outputs(job)] == [
        f"line {k}" for k in range(4000)
    ]


def test_a_kernel_that_hands_over_its_last_outputs_late_waits_for_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert execute(NOTEBOOKS / "ends_slowly.ipynb", root=tmp_path).state == "completed"
    assert "timed out" not in capfd.readouterr().err


def test_a_broken_contract_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        execute(NOTEBOOKS / "trains.ipynb", {"workers": 0}, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_kernel_is_this_interpreter_whatever_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    spec.write_text(json.dumps({"argv": ["false"], "display_name": "", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    notebook = tmp_path / "which.ipynb"
    cell: dict[str, Any] = {
        "cell_type": "code",
        "metadata": {},
        "execution_count": None,
        "outputs": [],
    }
    source = "import os, sys; print(sys.prefix, os.environ['LABKIT_JOB'], os.getcwd(), sep='\\n')"
    cells = [cell | {"id": "a", "execution_count": None, "source": source}]
    record = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    notebook.write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    job = execute("which.ipynb")
    log = (job.path / "logs" / "notebook.log").read_text().split("\n")
    assert log[:3] == [sys.prefix, str(tmp_path / "runs/which/001"), str(tmp_path)]
    assert str(tmp_path) not in (job.path / "output.ipynb").read_text()


def test_an_interrupt_lets_the_cell_clean_up_and_is_recorded(tmp_path: Path) -> None:
    child = run_script(tmp_path, "is_interrupted.ipynb")
    wait_for_line(child, "waiting")
    child.send_signal(signal.SIGINT)
    wait_for_line(child, "cleaned up")
    assert (
        child.wait(PATIENCE) == 0
    )  # `execute` returns a result; only the command line exits with 130
    status = store.read_status(tmp_path / "runs" / "is_interrupted" / "001")
    assert status["state"] == "interrupted"


@pytest.mark.slow
def test_a_job_does_not_outlive_the_process_that_started_it(tmp_path: Path) -> None:
    child = run_script(tmp_path, "is_interrupted.ipynb")
    wait_for_line(child, "waiting")
    job = tmp_path / "runs" / "is_interrupted" / "001"
    process = psutil.Process(store.read_status(job)["pid"])
    family = [process, *process.children(recursive=True)]
    child.kill()
    status = final_status(job)
    assert status["state"] == "interrupted"
    assert status["cause"] == "interrupted: the command that started the notebook has ended"
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []


def test_a_job_whose_process_is_killed_is_not_running(tmp_path: Path) -> None:
    child = run_script(tmp_path, "is_interrupted.ipynb")
    wait_for_line(child, "waiting")
    job = tmp_path / "runs" / "is_interrupted" / "001"
    os.kill(store.read_status(job)["pid"], signal.SIGKILL)
    assert child.wait(PATIENCE) == 0
    status = store.read_status(job)
    assert status["state"] == "failed"
    assert "was ended by SIGKILL" in status["cause"]


def test_html_names_no_machine_and_keeps_its_scripts(tmp_path: Path) -> None:
    script = "<script>\nx = y.replace(/usr/g, '/a/b/c');\n</script>"
    lines = ["<p>/srv/lab/alice/x.npz</p>\n", *script.splitlines(True), "<b>/srv/lab/bob/y</b>"]
    output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": lines}}
    notebook = {"metadata": {}, "cells": [{"cell_type": "code", "outputs": [output]}]}
    path = tmp_path / "output.ipynb"
    ExecutionRecord().write(json.dumps(notebook), str(path))
    (kept,) = json.loads(path.read_text())["cells"][0]["outputs"]
    assert kept["data"]["text/html"] == f"<p>…/x.npz</p>\n{script}<b>…/y</b>"


def test_a_cause_is_one_line() -> None:
    assert cause(ValueError("first\nsecond")) == "ValueError: first second"
    assert cause(KeyboardInterrupt()) == "KeyboardInterrupt"
