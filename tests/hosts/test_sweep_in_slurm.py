"""A sweep as a job array: each member on its own, ended by whoever, recorded and taken up again."""

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
from labkit.jobs.sweep import roster
from labkit.records import store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "tests" / "notebooks" / "is_swept.ipynb"
LABKIT = str(Path(sys.executable).with_name("labkit"))
# The command, which asks Slurm more often than a cluster of many people would like.
ASKS_OFTEN = """
import sys
from labkit.cli.app import app
from labkit.jobs.sweep import array

array.ASK_EVERY = 1.0
app(sys.argv[1:])
"""
SWEEP = Path("runs/is_swept-sweep")
COMMAND = ("sweep", NOTEBOOK, "number=1,2", "seconds=0,600", "--launcher", "slurm")
PATIENCE = 120.0  # seconds for what takes some


@pytest.fixture
def shared(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder that all nodes see, with the notebook."""
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="of-a-test-", dir=ROOT / "runs"))
    monkeypatch.chdir(folder)
    shutil.copy(NOTEBOOK, folder)
    yield folder
    bed.login(["scancel", f"--name={SWEEP.name}"], check=True)
    shutil.rmtree(folder)


def start(bed: Testbed, *words: object) -> subprocess.Popen[str]:
    """A command on the login node, with all that it says in one stream."""
    command = bed.command("login", [sys.executable, "-c", ASKS_OFTEN, *map(str, words)])
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, **both)  # type: ignore[call-overload,no-any-return]


def statuses() -> dict[str, dict[str, Any]]:
    found = sorted(SWEEP.glob("[0-9]*/status.json"))
    return {path.parent.name[:3]: store.read_json(path) for path in found}


def states() -> list[str]:
    return [status["state"] for status in statuses().values()]


def until(happened: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < limit, states()
        time.sleep(0.05)


def test_members_end_one_by_one_and_what_is_left_goes_on(bed: Testbed, shared: Path) -> None:
    sweep = start(bed, *COMMAND, "--slurm", "-n1 -t5")
    until(lambda: states() == ["completed", "running"] * 2)
    listed = bed.login([LABKIT, "ls"]).stdout
    assert "4 members: 2 running, 2 completed" in listed
    array = statuses()["002"]["element"].partition("_")[0]
    bed.login(["scancel", f"{array}_1"], check=True)
    stopped = bed.login([LABKIT, "stop", next(SWEEP.glob("004*"))])
    assert (stopped.returncode, "stopped:" in stopped.stdout) == (0, True), stopped.stderr
    said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, said
    assert f"job array {array} of 4 members is in Slurm's queue" in said
    assert "2 of 4 completed" in said
    found = statuses()
    assert found["002"]["cause"] == f"Slurm ended job {array}_1: it was cancelled"
    assert found["004"]["state"] == "interrupted"
    assert "cancelled" in found["004"]["cause"]
    assert "cleaned up 2" in (next(SWEEP.glob("004*")) / "output.ipynb").read_text()
    assert not any((SWEEP / ".slurm").iterdir())

    # The same command takes up what is missing; Ctrl-C lets Slurm end it, and says by whom.
    again = start(bed, *COMMAND, "--slurm", "-n1 -t5", "--resume")
    until(lambda: states() == ["completed", "running"] * 2)
    os.kill(roster.read(SWEEP)["pid"], signal.SIGINT)
    said, _ = again.communicate(timeout=PATIENCE)
    assert (again.returncode, "4 members, 2 done" in said) == (130, True), said
    latest = statuses()
    assert {latest[name]["cause"] for name in ("002", "004")} == {"interrupted by the user"}
    assert (latest["001"], latest["003"]) == (found["001"], found["003"])
    left = bed.login(["squeue", "--noheader", "--states=pending,running"])
    assert left.stdout == ""
    assert not {"hostname", "host", "node"} & json.loads(json.dumps(latest["002"])).keys()


def test_an_element_outlives_who_has_submitted_it_and_is_followed_again(
    bed: Testbed, shared: Path
) -> None:
    command = ("sweep", NOTEBOOK.name, "number=1", "--repeats", "1", "-p", "seconds", "600")
    sweep = start(bed, *command, "--launcher", "slurm")
    until(lambda: states() == ["running"])
    sweep.kill()
    sweep.communicate()
    assert roster.read(SWEEP)["state"] == "interrupted"
    again = start(bed, "sweep", SWEEP, "--resume")  # the record says that Slurm runs it
    assert again.stdout is not None
    assert "1 member in Slurm's queue already\n" in again.stdout
    bed.login(["scancel", statuses()["001"]["element"]], check=True)
    said, _ = again.communicate(timeout=PATIENCE)
    # It had its turn in this call: only the next one would begin it anew.
    assert (again.returncode, states()) == (1, ["interrupted"]), said
    assert Path("started.txt").read_text().split() == ["1", "0"]  # once


def test_a_folder_that_nodes_do_not_see_is_told(bed: Testbed, tmp_path: Path) -> None:
    """This one lies in /tmp, of which each host has its own."""
    sweep = start(bed, *COMMAND, "--runs", tmp_path / "runs")
    said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1
    assert said.count("all nodes must see the sweep's folder and this Python") == 4, said
