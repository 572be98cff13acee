"""Test that a stop ends labkit's own processes cleanly and leaves all others alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.common.errors import LabkitError
from labkit.jobs.elements import ELSEWHERE, is_ours
from labkit.jobs.running import stop
from labkit.jobs.sweep import manifest
from labkit.jobs.sweep.sweep_plan import SweepSpec, make
from labkit.records import folders, store

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "is_interrupted.ipynb"


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of the same user that labkit has not started."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def named(process: subprocess.Popen[bytes]) -> store.Record:
    """Return the fields with which a record names the process that works on a job."""
    started = psutil.Process(process.pid).create_time()
    since_boot = started - psutil.boot_time()
    return {"pid": process.pid, "process_started": started, "since_boot": since_boot}


def forged_job(process: subprocess.Popen[bytes]) -> Path:
    """Return a job whose forged record names this process."""
    job = store.new_job_directory("runs", "forged.ipynb", {})
    status = store.read_json(job / "status.json") | named(process) | {"state": "running"}
    store.write_json(job / "status.json", status)
    return job


def forged_sweep(process: subprocess.Popen[bytes]) -> Path:
    """Return a sweep whose forged record names this process."""
    folder = store.new_run_directory("runs", "sweep")
    record = {"notebook": "a.ipynb", "plan": "", "members": [], "state": "running"}
    store.write_json(folder / "sweep.json", record | named(process))
    return folder


@pytest.mark.parametrize("forge", [forged_job, forged_sweep])
def test_a_process_that_only_a_record_names_goes_on(
    forge: Callable[[subprocess.Popen[bytes]], Path], bystander: subprocess.Popen[bytes]
) -> None:
    folder, said = forge(bystander), list[str]()
    assert stop(Path("runs"), said.append) == []
    assert said == [f"{folder} {ELSEWHERE}"]
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.2)


def test_the_registered_process_is_ended_whatever_the_record_names(
    bystander: subprocess.Popen[bytes],
) -> None:
    job, said = forged_job(bystander), list[str]()
    script = (
        "import pathlib, sys, time; from labkit.records.folders import registration\n"
        "with registration(pathlib.Path(sys.argv[1])): print('on', flush=True); time.sleep(600)"
    )
    words = [sys.executable, "-c", script, str(job)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        os.chdir("runs")  # the folder is the same under another path
        assert stop(Path("."), said.append) == []
    assert said == [f"stopped: {job.relative_to('runs')}"]
    assert bystander.poll() is None
    # A killed job leaves a lock entry but no process, so there is nothing to stop or report.
    assert stop(Path("."), said.append) == []
    assert said[1:] == ["nothing runs in ."]


def test_what_runs_on_another_machine_is_left_to_it(bystander: subprocess.Popen[bytes]) -> None:
    job, said = forged_job(bystander), list[str]()
    elsewhere = store.read_json(job / "status.json") | {"process_started": 1.0, "since_boot": -1.0}
    store.write_json(job / "status.json", elsewhere)
    assert stop(Path("runs"), said.append) == []
    assert said == ["nothing runs in runs"]


def test_a_process_of_another_machine_is_not_ours(
    bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = forged_job(bystander)
    with folders.registration(job):
        assert folders.process(job) == store.this_process() | {
            "schema": store.SCHEMA,
            "machine": folders._machine(),
        }
        monkeypatch.setattr(folders, "_machine", lambda: "another one, or before a restart")
        assert folders.process(job) is None
        monkeypatch.undo()
    assert folders.process(job) is None


SLURM = """#!/bin/sh
[ $(basename $0) = squeue ] && echo "12_3|RUNNING|None|N/A|all"
echo "$(basename $0) $*" >> "$ASKED"
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of calls to fake Slurm commands; array task 3 of their job 12 runs."""
    folder = tmp_path / "commands"
    folder.mkdir()
    for name in ("squeue", "scancel"):
        (folder / name).write_text(SLURM)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return tmp_path / "asked"


def test_a_job_of_slurms_that_only_a_record_names_goes_on(asked: Path) -> None:
    job, said = store.new_job_directory("runs", "a.ipynb", {}), list[str]()
    status = store.read_json(job / "status.json") | {"state": "running", "element": "12_3"}
    store.write_json(job / "status.json", status)
    assert stop(Path("runs"), said.append) == []
    assert said == [f"{job} {ELSEWHERE}"]
    assert "scancel" not in asked.read_text()


def test_the_elements_of_a_submitted_array_are_ours() -> None:
    sweep = store.new_run_directory("runs", "sweep")
    folders.add_array(sweep, "12")
    folders.add_array(sweep, "20")
    assert [is_ours(sweep / "001", each) for each in ("12_3", "20_0", "1_2")] == [True, True, False]
    assert not is_ours(sweep.with_name("other") / "001", "12_3")
    folders.forget_arrays(sweep)
    assert not is_ours(sweep / "001", "12_3")


def test_another_login_finds_what_this_one_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = store.new_job_directory("runs", "a.ipynb", {})
    with folders.registration(job):
        folders.add_array(job.parent, "12")
        monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path / "runtime of the next login"))
        assert folders.process(job)
        assert is_ours(job, "12_3")


@pytest.mark.parametrize("launcher", [[], ["--launcher", "local"]])
def test_a_member_whose_element_runs_on_does_not_run_anew(launcher: list[str], asked: Path) -> None:
    shutil.copy(NOTEBOOK.with_name("is_swept.ipynb"), ".")
    plan = make(Path("is_swept.ipynb"), SweepSpec({"number": (1, 2)}, {}))
    sweep = manifest.create(Path("runs"), "sweep", plan)
    manifest.update(sweep, slurm="", state="interrupted")
    member = manifest.queue(sweep, plan, plan.members[1], element="12_3")
    told = CliRunner().invoke(app, ["sweep", str(sweep), "--resume", *launcher])
    assert told.exit_code == 1, told.output
    assert "job 12_3 is running" in told.output
    assert "scancel 12_3" in told.output
    assert store.read_json(member / "status.json")["element"] == "12_3"
    assert manifest.read(sweep)["slurm"] == ""  # still Slurm's
    assert "sbatch" not in asked.read_text()


@pytest.mark.slow
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
    store.start(run, {"model": "mlp"})  # started by this process
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
