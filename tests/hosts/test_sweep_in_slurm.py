"""Test a sweep as a job array: separate members that are cancelled, recorded and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.hosts import Testbed
from labkit.jobs.sweep import manifest
from labkit.records import store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "tests" / "notebooks" / "is_swept.ipynb"
LABKIT = str(Path(sys.executable).with_name("labkit"))
# The command asks Slurm more often than is polite on a shared cluster.
ASKS_OFTEN = """
import sys
from labkit.cli.app import app
from labkit.jobs.sweep import array

array.ASK_EVERY = 1.0
app(sys.argv[1:])
"""
SWEEP = Path("runs/is_swept-sweep")
VALUES = ("number=1,2", "seconds=0,600", "--launcher", "slurm")
PATIENCE = 120.0  # seconds to wait for what takes several


@pytest.fixture
def shared(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a working folder that all nodes see, with a copy of the notebook."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="of-a-test-", dir=ROOT / "runs"))
    monkeypatch.chdir(folder)
    shutil.copy(NOTEBOOK, folder)
    yield folder
    bed.login(["scancel", f"--name={SWEEP.name}"], check=True)
    shutil.rmtree(folder)


def start(bed: Testbed, *words: object) -> subprocess.Popen[str]:
    """Start a labkit command on the login node, with stdout and stderr in one stream."""
    command = bed.command("login", [sys.executable, "-c", ASKS_OFTEN, *map(str, words)])
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, **both)  # type: ignore[call-overload,no-any-return]


def statuses() -> dict[str, dict[str, Any]]:
    found = sorted(SWEEP.glob("[0-9]*/status.json"))
    return {path.parent.name[:3]: store.read_json(path) for path in found}


def states() -> list[str]:
    return [status["state"] for status in statuses().values()]


def begun() -> list[str]:
    """Return the numbers of the members whose cells have started and can clean up after a stop."""
    path = Path("started.txt")
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < limit, states()
        time.sleep(0.05)


def test_members_end_one_by_one_and_what_is_left_goes_on(bed: Testbed, shared: Path) -> None:
    command = ("sweep", NOTEBOOK.name, *VALUES, "--slurm", "-n1 -t5")
    sweep = start(bed, *command)
    until(lambda: states() == ["completed", "running"] * 2 and len(begun()) == 4)
    listed = bed.login([LABKIT, "ls"]).stdout
    assert "4 members: 2 running, 2 completed" in listed
    array = statuses()["002"]["element"].partition("_")[0]
    bed.login(["scancel", f"{array}_1"], check=True)
    stopped = bed.login([LABKIT, "stop", next(SWEEP.glob("004*"))])
    assert (stopped.returncode, "stopped:" in stopped.stdout) == (0, True), stopped.stderr
    said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, said
    assert f"job array {array} of 4 notebook runs is in Slurm's queue" in said
    assert "2 of 4 completed" in said
    found = statuses()
    assert found["002"]["cause"] == f"Slurm ended job {array}_1: it was cancelled"
    assert found["004"]["state"] == "interrupted"
    assert "cancelled" in found["004"]["cause"]
    assert "cleaned up 2" in (next(SWEEP.glob("004*")) / "output.ipynb").read_text()
    assert not any((SWEEP / ".slurm").iterdir())

    # The same command resumes the missing members, which outlive the command when it is killed.
    again = start(bed, *command, "--resume")
    until(lambda: sorted(begun()) == ["1"] * 3 + ["2"] * 3)
    again.kill()
    assert "4 members, 2 done" in again.communicate()[0]
    assert (manifest.read(SWEEP)["state"], states()) == (
        "interrupted",
        ["completed", "running"] * 2,
    )

    # The record says that Slurm runs the sweep. Ctrl-C makes Slurm end the members, and the record
    # says who stopped them.
    followed = start(bed, "sweep", SWEEP, "--resume")
    assert followed.stdout is not None
    assert "2 notebook runs already in Slurm's queue\n" in followed.stdout
    os.kill(manifest.read(SWEEP)["pid"], signal.SIGINT)
    said, _ = followed.communicate(timeout=PATIENCE)
    assert (followed.returncode, len(begun())) == (130, 6), said
    latest = statuses()
    assert {latest[name]["cause"] for name in ("002", "004")} == {"interrupted by the user"}
    assert (latest["001"], latest["003"]) == (found["001"], found["003"])
    left = bed.login(["squeue", "--noheader", "--states=pending,running"])
    assert left.stdout == ""
    assert not {"hostname", "host", "node"} & json.loads(json.dumps(latest["002"])).keys()


def test_what_a_killed_submission_holds_is_submitted_anew(bed: Testbed, shared: Path) -> None:
    dies = "from labkit.hosts.queue import Queue; import os, signal\n"
    dies += "Queue.release = lambda self, number: os.kill(os.getpid(), signal.SIGKILL)\n"
    command = ["sweep", NOTEBOOK.name, "number=1,2", "--launcher", "slurm", "--slurm", "-n1 -t5"]
    words = bed.command("login", [sys.executable, "-c", dies + ASKS_OFTEN, *command])
    assert subprocess.run(words, capture_output=True).returncode != 0
    assert states() == ["queued", "queued"]
    array = statuses()["001"]["element"].partition("_")[0]
    again = start(bed, *command, "--resume")
    said, _ = again.communicate(timeout=PATIENCE)
    assert (again.returncode, states()) == (0, ["completed", "completed"]), said
    assert "2 elements cancelled, left on hold by an interrupted submission" in said
    assert bed.login(["squeue", "--noheader", f"--jobs={array}"]).stdout == ""


def test_a_folder_that_nodes_do_not_see_is_told(bed: Testbed, tmp_path: Path) -> None:
    """Test with a folder in /tmp, which each host has of its own."""
    sweep = start(bed, "sweep", NOTEBOOK, *VALUES, "--runs", tmp_path / "runs")
    said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1
    assert said.count("all nodes need access to the sweep's folder and to this Python") == 4, said
