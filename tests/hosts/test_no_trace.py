"""Test that a testbed leaves nothing behind, however it ends."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from labkit.cli.app import app

pytestmark = pytest.mark.slow

KINDS = ("net", "mnt", "uts", "ipc", "pid")

# A notebook's kernel that is killed while a Slurm job and a command on a host still run.
PARENT = """
import json, subprocess, sys, time
import labkit as lk
bed = lk.testbed()
started = [
    subprocess.Popen(bed.command("login", ["srun", "-N2", "sleep", sys.argv[1]])),
    subprocess.Popen(bed.command("a", ["sleep", sys.argv[1]])),
]
while bed.login(["squeue", "--noheader", "--states=RUNNING"]).stdout.count("sleep") < 1:
    time.sleep(0.1)
print(bed.agent.parent, flush=True)
time.sleep(1000)
"""


class Traces(NamedTuple):
    """Traces by which a testbed would be noticed."""

    folder: Path
    spaces: set[str]  # namespaces of the testbed's processes
    device: str
    nap: str = "none"  # argument of the `sleep` commands in the testbed

    def left(self) -> list[str]:
        """Return the traces of the testbed that still exist."""
        processes = [pid for pid in running() if self.spaces & {*spaces_of(pid)}]
        named = [str(file.stat().st_ino) for file in Path("/run/netns").glob("*")]
        mounts = Path("/proc/self/mountinfo").read_text()
        shown = [f"process {pid}: {words(pid)}" for pid in processes if words(pid)]
        shown += [f"process {pid}: {words(pid)}" for pid in running() if self._tells(words(pid))]
        shown += [f"namespace {s}" for s in self.spaces if any(f"[{n}]" in s for n in named)]
        shown += ["a mount"] * (str(self.folder) in mounts)
        shown += ["a link"] * (f" {self.device}@" in links())
        places = (self.folder, self.folder.parent, self.folder.parents[1])
        return shown + [f"folder {place}" for place in places if place.exists()]

    def _tells(self, command: str) -> bool:
        return str(self.folder) in command or f"sleep {self.nap} " in command


def running() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def spaces_of(pid: int) -> Iterator[str]:
    for kind in KINDS:
        with suppress(OSError):  # the process has ended meanwhile
            yield os.readlink(f"/proc/{pid}/ns/{kind}")


def words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def links() -> str:
    return subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout


def traces(folder: Path, nap: str = "none") -> Traces:
    said = json.loads((folder / "testbed.json").read_text())
    inside = [said["control"], *said["hosts"].values()]
    spaces = {space for pid in inside for space in spaces_of(pid)} - {*spaces_of(os.getpid())}
    found = Traces(folder, spaces, f"labkit-bed{said['addresses']['a'].split('.')[2]}", nap)
    # The control process and both hosts have their own namespaces, and every kind of trace exists
    # before the end.
    assert len(spaces) == 3 * len(KINDS)
    noticed = " ".join(found.left())
    assert all(word in noticed for word in ("slurmctld", "slurmd", "a link", "folder"))
    return found


def wait_for_none(found: Traces) -> None:
    """Wait until no trace is left: the system removes links a moment after their namespaces."""
    end = time.monotonic() + 30
    while left := found.left():
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.fixture
def own_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a runtime folder that no other test uses."""
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


@pytest.mark.parametrize("victim", ["parent", "holder", "control"])
def test_kill_9_leaves_nothing(means: None, own_runtime: Path, victim: str) -> None:
    nap = f"{secrets.randbelow(10**6) + 10**6}"  # seconds; no other process sleeps this long
    command = [sys.executable, "-c", PARENT, nap]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with parent:
        try:
            assert parent.stdout is not None
            folder = Path(parent.stdout.readline().strip())
            found = traces(folder, nap)
            assert f"sleep {nap}" in " ".join(found.left())
            said = json.loads((folder / "testbed.json").read_text())
            whom = {"parent": parent.pid, "holder": said["pid"], "control": said["control"]}
            os.kill(whom[victim], signal.SIGKILL)
            if victim != "parent":
                # The testbed's own folder and links vanish; its two parent folders may remain after
                # the holder is killed.
                end = time.monotonic() + 30
                while folder.exists() or any("link" in line for line in found.left()):
                    assert time.monotonic() < end, found.left()
                    time.sleep(0.1)
        finally:
            parent.kill()
    if victim == "holder":
        for place in (folder.parent, folder.parents[1]):
            place.rmdir()  # rmdir succeeds only if the folder is empty
    wait_for_none(found)


def test_a_command_leaves_hosts_running_until_it_ends_them(means: None, own_runtime: Path) -> None:
    def labkit(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["testbed", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert labkit("status") == "no testbed is running; start one: labkit testbed up\n"
    said = labkit("up", "--bandwidth", "100Mb", "--cores", "4")
    try:
        assert said == labkit("status")
        assert said.startswith("2 hosts at 100Mb, Slurm with 4 CPUs on each host\n")
        folder = own_runtime / f"labkit-{os.getuid()}" / "testbed" / "up"
        found = traces(folder)
        again = CliRunner().invoke(app, ["testbed", "up"])
        assert (again.exit_code, again.stderr) == (
            1,
            "labkit: a testbed is already running; stop it first: labkit testbed down\n",
        )
        login = [folder / "login", "srun", "-N2", "hostname"]
        ran = subprocess.run(login, capture_output=True, text=True, timeout=60)
        assert sorted(ran.stdout.split()) == ["a", "b"], ran.stderr
    finally:
        assert labkit("down") == "the testbed has stopped\n"
    wait_for_none(found)
    assert labkit("down") == "no testbed is running\n"
