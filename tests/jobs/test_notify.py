"""Test that the command of --notify runs once, whatever the end, and gets values, never code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from labkit.cli.app import app
from labkit.common.errors import InvalidInput, LabkitError
from labkit.jobs.notify import command_words, notifying
from labkit.jobs.sweep import manifest, sweep_plan
from labkit.jobs.sweep.sweep_plan import SweepSpec, read_assignments
from labkit.records import store

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SAYS = NOTEBOOKS / "says_its_parameters.ipynb"
PATIENCE = 120.0
# The command appends its variables to a file, one JSON text per call.
SCRIPT = """
import json, os
found = {k.removeprefix("LABKIT_JOB_"): v for k, v in os.environ.items() if "LABKIT_JOB_" in k}
open("notified.txt", "a").write(json.dumps(found) + chr(10))
"""
WORDS = [sys.executable, "-c", SCRIPT]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def notified() -> list[dict[str, str]]:
    path = Path("notified.txt")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_command_learns_what_ended() -> None:
    job = store.new_job_directory("runs", "tour.ipynb", {})
    with notifying(WORDS, Path("tour.ipynb")) as started:
        store.mark_running(job)
        started(job)
        store.complete(job)
    (found,) = notified()
    assert found["STATE"] == "completed"
    assert found["FOLDER"] == str(job.resolve())
    assert (found["NOTEBOOK"], found["EXIT_CODE"]) == ("tour.ipynb", "0")
    assert found["SUMMARY"].startswith("tour.ipynb completed after ")
    assert found["SUMMARY"].endswith("; records: runs/tour/001")


@pytest.mark.parametrize(
    ("error", "code", "state"),
    [
        (SystemExit(2), "2", "failed"),
        (LabkitError("rank 1 died"), "1", "failed"),
        (KeyboardInterrupt(), "130", "interrupted"),
    ],
)
def test_an_experiment_that_fails_is_told_by_its_exit_code(
    error: BaseException, code: str, state: str
) -> None:
    def fail() -> None:
        with notifying(WORDS, Path("e.yaml")) as started:
            started(Path("runs/e"))
            raise error

    with pytest.raises(type(error)):
        fail()
    (found,) = notified()
    assert (found["STATE"], found["EXIT_CODE"]) == (state, code)
    assert ("rank 1 died" in found["SUMMARY"]) == isinstance(error, LabkitError)


def test_texts_of_a_job_are_values_and_no_code() -> None:
    text = "$(touch hacked); touch hacked; `touch hacked` \x1b]0;title\x07"
    job = store.new_job_directory("runs", "a $(touch hacked).ipynb", {})
    with notifying(
        ["sh", "-c", 'echo "$LABKIT_JOB_SUMMARY" > summary'], Path("a.ipynb")
    ) as started:
        started(job)
        store.fail(job, text, rank=1)
    line = Path("summary").read_text()
    assert "a.ipynb failed on rank 1: $(touch hacked); touch hacked;" in line
    assert "\x1b" not in line
    assert not Path("hacked").exists()


def test_a_job_that_did_not_start_is_not_told() -> None:
    with notifying(WORDS, Path("tour.ipynb")):
        pass
    command = f"{sys.executable} -c 'raise SystemExit'"
    result = CliRunner().invoke(app, ["run", str(SAYS), "-p", "cuont", "1", "--notify", command])
    assert result.exit_code == 2
    assert notified() == []


def test_a_sweep_that_an_error_ends_is_told() -> None:
    plan = sweep_plan.make(SAYS, SweepSpec(read_assignments(("count=1,2",)), {}))
    sweep = manifest.create(Path("runs"), "sweep", plan)
    manifest.update(sweep, state="running")  # by this process, which then fails
    with pytest.raises(LabkitError), notifying(WORDS, SAYS) as started:
        _fail(started, sweep)
    (found,) = notified()
    assert (found["STATE"], found["EXIT_CODE"]) == ("failed", "1")
    assert "no disk" in found["SUMMARY"]


def _fail(started: Callable[[Path], None], folder: Path) -> None:
    started(folder)
    raise LabkitError("no disk")


@pytest.mark.parametrize(
    ("code", "words"), [("exit(3)", "ended with code 3"), ("import os; os.abort()", "SIGABRT")]
)
def test_a_command_that_fails_is_reported_and_changes_nothing(
    code: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with notifying([sys.executable, "-c", code], Path("e.yaml")) as started:
        started(Path("runs/e"))
    out, err = capfd.readouterr()
    assert out == ""
    assert f"{words}; the job is unaffected" in err


@pytest.mark.parametrize(
    ("command", "words"),
    [("", "no program ''"), ("no-such-program -x", "'no-such-program'"), ("echo 'a", "quotation")],
)
def test_a_command_that_cannot_run_is_refused(command: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        command_words(command)


def test_the_command_runs_if_the_process_of_the_job_is_killed() -> None:
    job = store.new_job_directory("runs", "tour.ipynb", {})
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from labkit.jobs.notify import notifying\n"
        "from labkit.records import store\n"
        "job = Path(sys.argv[1])\n"
        "with notifying(sys.argv[2:], Path('tour.ipynb')) as started:\n"
        "    store.mark_running(job)\n"
        "    started(job)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(job), *WORDS], check=False)
    assert done.returncode == -signal.SIGKILL
    limit = time.monotonic() + PATIENCE
    while not notified():
        assert time.monotonic() < limit, "the command did not run"
        time.sleep(0.05)
    (found,) = notified()
    assert (found["STATE"], found["EXIT_CODE"]) == ("interrupted", "")


@pytest.mark.slow
def test_a_sweep_tells_its_end_once() -> None:
    Path("notify.py").write_text(SCRIPT)
    command = f"{sys.executable} notify.py"
    swept = ("sweep", NOTEBOOKS / "is_swept.ipynb", "number=1,2", "-p", "seconds", 0)
    words = [*map(str, swept), "--notify", command]
    assert CliRunner().invoke(app, words).exit_code == 0
    (found,) = notified()
    assert found["STATE"] == "completed"
    assert "2 members: 2 completed" in found["SUMMARY"]
    assert os.path.samefile(found["FOLDER"], "runs/is_swept-sweep")
