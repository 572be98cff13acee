"""Test `labkit sweep`: one-line errors, and sweeps that are interrupted and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner, Result

from labkit.cli.app import app
from labkit.common.files import usable_cores
from labkit.common.machine import OVERSUBSCRIBE
from labkit.jobs.sweep import manifest
from labkit.records import store

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
SWEPT = NOTEBOOKS / "is_swept.ipynb"
SWEEP = Path("runs/is_swept-sweep")
PATIENCE = 120.0  # timeout for tasks that take one or two seconds


def labkit(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a sweep in a new process, as a shell does."""
    script = "import sys; from labkit.cli.app import app; app(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", script, "sweep", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=PATIENCE)
    return child.returncode, out, err


def until(happened: Callable[[], Any]) -> None:
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < limit, "it never happened"
        time.sleep(0.02)


def started() -> Counter[int]:
    """Return how often the cell of each member of the sweep has begun, by the member's number."""
    path = Path("started.txt")
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter(int(line.split()[0]) for line in lines)


def statuses(sweep: Path = SWEEP) -> dict[str, dict[str, Any]]:
    """Return the status record of each member of the sweep; all of them must be readable."""
    return {path.name: store.read_status(path) for path in sorted(sweep.glob("[0-9]*"))}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the sweep has no parameter values"),
        (["numbr=1,2"], "has no parameter 'numbr' (did you mean 'number'?)"),
        (["number=1,x"], "number = 'x' is not int"),
        (["number="], "has an empty item"),
        (["number=range(5,1)"], "has no values"),
        (["number"], "is not of the form name=a,b,c"),
        (["workers=1,0"], "workers=0 is impossible"),
        (["number=1,2", "--random", 3], "exceeds the 2 combinations"),
        (["number=1,2", "--jobs", "many"], "--jobs many is impossible"),
        (["number=1,2", "--jobs", 0], "--jobs 0 is impossible"),
        (["number=1,2", "--limit", 0], "--limit='0' is impossible"),
        (["number=1,2", "-p", "number", 1], "both swept and fixed"),
        (["number=1,2", "seed=1,2,3", "--zip", "number,seed"], "number has 2, seed has 3 values"),
        (["-f", "nothing.yaml"], "nothing.yaml cannot be read"),
        (["-f", "bad.yaml"], "bad.yaml is not YAML"),
    ],
)
def test_what_cannot_run_ends_with_2_and_one_line(arguments: list[object], words: str) -> None:
    Path("bad.yaml").write_text("number: [1")
    result = labkit("sweep", SWEPT, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert not Path("runs").exists()


def test_zipped_values_are_given_by_the_command_line_or_a_file() -> None:
    Path("pairs.yaml").write_text("number: [1, 2]\nseed: [3, 4]\nzip: [number, seed]\n")
    values = ("number=1,2", "seed=3,4", "--zip", "number,seed")
    for arguments in (values, ("-f", "pairs.yaml")):
        result = labkit("sweep", SWEPT, *arguments, "--check")
        assert (result.exit_code, result.stdout) == (0, "2 members\n"), result.output


@pytest.mark.slow
def test_a_failed_member_is_recorded_and_resume_runs_what_is_missing() -> None:
    shutil.copy(SWEPT, "is_swept.ipynb")
    Path("broken").touch()
    Path("sweep.yaml").write_text("number: range(0, 4)\nseconds: [0]\n")
    code, out, err = ended(start("is_swept.ipynb", "-f", "sweep.yaml"))
    assert code == 1
    assert out.splitlines()[-1] == f"3 of 4 completed; result: {SWEEP}"
    assert "003_number=2  failed" in err
    assert f"labkit sweep {SWEEP} --resume" in err
    assert "ValueError: no use for 2" in err
    listed = labkit("ls", SWEEP).stdout
    assert "4 members: 3 completed, 1 failed" in listed
    assert "ValueError: no use for 2" in listed
    (SWEEP / "002_number=1/status.json").unlink()  # an incomplete record, as after a full disk
    assert labkit("ls").exit_code == 0
    Path("broken").unlink()

    assert labkit("sweep", SWEEP).exit_code == 2  # an existing sweep needs --resume
    code, out, err = ended(start(SWEEP, "--resume"))
    assert (code, out.splitlines()[-1]) == (0, f"4 of 4 completed; result: {SWEEP}")
    assert started() == {0: 1, 1: 2, 2: 2, 3: 1}
    assert manifest.read(SWEEP)["state"] == "completed"


@pytest.mark.slow
def test_failed_members_run_again_as_often_as_retries_allow() -> None:
    fails = (
        'if number == 3 or (number == 2 and not Path("again").exists()):\n    Path("again").touch()'
    )
    text = SWEPT.read_text()
    changed = text.replace(
        'if Path(\\"broken\\").exists() and number == 2:', json.dumps(fails)[1:-1]
    )
    assert changed != text
    Path("is_swept.ipynb").write_text(changed)
    code, out, err = ended(start("is_swept.ipynb", "number=1,2,3", "--jobs", 1, "--retries", 1))
    assert (code, out.splitlines()[-1]) == (1, f"2 of 3 completed; result: {SWEEP}")
    assert started() == {1: 1, 2: 2, 3: 2}
    assert "002_number=2: attempt 1 of 2 failed: cell In [3]: ValueError" in err
    assert [status["state"] for status in statuses().values()] == ["completed"] * 2 + ["failed"]
    assert len([*(SWEEP / ".earlier").iterdir()]) == 2
    assert manifest.read(SWEEP)["retries"] == 1


@pytest.mark.slow
def test_ctrl_c_lets_members_clean_up_and_leaves_a_sweep_to_resume() -> None:
    child = start(SWEPT, "number=0,1,2", "-p", "seconds", 300, "--jobs", 2)
    until(lambda: len(started()) == 2)
    child.send_signal(signal.SIGINT)
    code, _, err = ended(child)
    assert code == 130
    assert "to execute them: the same command with --resume" in err
    found = statuses()
    assert [status["state"] for status in found.values()] == ["interrupted"] * 2
    for name in found:
        assert "cleaned up" in (SWEEP / name / "logs" / "notebook.log").read_text()
    assert "3 members: 1 queued, 2 interrupted" in labkit("ls").stdout
    assert [line.split()[:2] for line in labkit("ls").stdout.splitlines()[-1:]] == [
        ["is_swept-sweep/003_number=2", "queued"]
    ]


@pytest.mark.slow
def test_members_run_abreast_as_cores_allow_and_end_at_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores = usable_cores()
    wide = f"workers={cores + 1},{cores + 2}"
    child = start(SWEPT, wide, "-p", "seconds", 300, "--limit", 1, "--force")
    assert ended(child)[0] == 1
    found = list(statuses().values())
    assert [status["cause"] for status in found] == ["stopped at the time limit of 1 s"] * 2
    assert found[0]["ended"] < found[1]["started"]  # too wide for the cores, so one at a time


def test_members_that_run_abreast_need_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERSUBSCRIBE, "")  # --force changes this variable
    swept = ("sweep", SWEPT, "workers=2", "number=range(0,2000)", "--check", "--force")
    assert labkit(*swept, "--jobs", 1).exit_code == 0
    result = labkit(*swept, "--jobs", 9999)
    assert result.exit_code == 2
    assert "4000 ranks need at least" in result.stderr


@pytest.mark.slow
def test_a_notebook_that_is_edited_while_its_sweep_runs_changes_nothing_of_it() -> None:
    notebook = Path("edited.ipynb")
    shutil.copy(SWEPT, notebook)
    child = start(notebook, "number=0,1", "-p", "seconds", 1, "--jobs", 1)
    until(started)
    notebook.write_text(
        notebook.read_text().replace("print(number, seed", "print(number + 7, seed")
    )
    assert ended(child)[0] == 0
    assert sorted(started()) == [0, 1]
    again = labkit("sweep", notebook, "number=0,1", "-p", "seconds", 1, "--resume")
    assert again.exit_code == 0
    assert sorted(started()) == [0, 1, 7, 8]  # the edited notebook prints 7 and 8, not 0 and 1


def test_members_whose_ranks_nobody_knows_run_alone() -> None:
    result = labkit("sweep", NOTEBOOKS / "says_its_parameters.ipynb", "count=1,2")
    assert (
        "no parameter `workers`, so notebook runs are executed one after another" in result.stderr
    )
    [one, other] = statuses(Path("runs/says_its_parameters-sweep")).values()
    assert one["ended"] < other["started"]


@pytest.mark.slow
def test_a_sweep_that_is_killed_at_any_moment_loses_nothing_and_runs_nothing_twice() -> None:
    members = 5
    arguments = [SWEPT, f"number=range({members})", "-p", "seconds", 0.1, "--jobs", 2]
    done: dict[str, Any] = {}
    for moment in range(2):
        child = start(*arguments, *(["--resume"] if moment else []))
        until(lambda: len(started()) > 2 * moment + 1)  # noqa: B023 - called at once
        child.kill()
        child.wait()
        found = statuses()
        completed = {k: v for k, v in found.items() if v["state"] == "completed"}
        assert done.items() <= completed.items()
        done = completed
    code, _, err = ended(start(*arguments, "--resume"))
    assert code == 0, err
    final = statuses()
    assert [status["state"] for status in final.values()] == ["completed"] * members
    assert done.items() <= final.items()
    earlier = Counter(path.name.split("_")[0] for path in (SWEEP / ".earlier").glob("*"))
    assert all(started()[k] <= 1 + earlier[f"{k + 1:03d}"] for k in range(members))
    assert [path.name for path in SWEEP.glob(".*.new")] == []


@pytest.mark.slow
def test_stop_ends_a_sweep_and_nothing_else() -> None:
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reused = store.new_job_directory("runs", "reused.ipynb", {})
    store.mark_running(reused)
    status = store.read_json(reused / "status.json")
    earlier = {"pid": foreign.pid, "process_started": 1.0, "since_boot": 1.0}  # another's number
    store.write_json(reused / "status.json", status | earlier)
    child = start(SWEPT, "number=0,1", "-p", "seconds", 300, "--jobs", 1)
    until(started)
    result = labkit("stop")
    assert result.exit_code == 0
    assert result.stdout == f"stopped: {SWEEP}\n"
    assert ended(child)[0] == 130
    assert manifest.read(SWEEP)["state"] == "interrupted"
    assert foreign.poll() is None
    foreign.kill()
    foreign.wait()
    assert labkit("stop").stdout == "nothing runs in runs\n"


@pytest.mark.slow
def test_members_of_one_shape_share_their_engines() -> None:
    notebook = NOTEBOOKS / "names_its_engines.ipynb"
    child = start(notebook, "workers=1,2", "number=1,2", "--jobs", 1)
    code, _, err = ended(child)
    assert code == 0, err
    folder = Path("runs/names_its_engines-sweep")
    logs = [(path / "logs/notebook.log").read_text() for path in sorted(folder.glob("[0-9]*"))]
    engines = [[line for line in log.splitlines() if line.startswith("engine")] for log in logs]
    assert engines[0] == engines[1]
    assert engines[2] == engines[3]
    assert [len(engine) for engine in engines] == [1, 1, 2, 2]
    pids = {int(line.split()[2]) for engine in engines for line in engine}
    assert len(pids) == 3
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))  # they end with the sweep


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_members_survive_being_killed_again_and_again() -> None:
    count = 24
    arguments = [SWEPT, f"number=range({count})", "--jobs", 2]
    done: dict[str, Any] = {}
    for moment in range(3):
        child = start(*arguments, *(["--resume"] if moment else []))
        until(lambda: (SWEEP / manifest.FILE).exists())
        time.sleep(2.0 + 1.3 * moment)  # kill it at a different moment
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        done |= {
            name: statuse for name, statuse in statuses().items() if statuse["state"] == "completed"
        }
    child = start(*arguments, "--resume")
    _, err = child.communicate(timeout=800)
    assert child.returncode == 0, err
    final = statuses()
    assert done.items() <= final.items()  # finished members have not run again
    assert len(final) == count
    assert {status["state"] for status in final.values()} == {"completed"}
    earlier = Counter(path.name.split("_")[0] for path in (SWEEP / ".earlier").glob("*"))
    assert all(started()[k] <= 1 + earlier[f"{k + 1:03d}"] for k in range(count))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--launcher", "slurm", "--retries", 1], "--retries has no effect; remove --retries"),
        (["--slurm", "-n1"], "--slurm has no effect without --launcher slurm; give both"),
        (
            ["--launcher", "slurm", "--search", "optuna", "--trials", 2, "--minimize", "loss"],
            "--launcher slurm submits all notebook runs at once, but --search chooses each trial",
        ),
    ],
)
def test_what_slurm_cannot_run_is_refused_before_anything_is_submitted(
    words: list[object], said: str
) -> None:
    refused = labkit("sweep", SWEPT, "number=1,2", *words)
    assert (refused.exit_code, said in refused.output) == (2, True), refused.output
    assert not Path("runs").exists()
