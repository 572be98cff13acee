"""Test that the doctor reports clusters whose kernel or keeper is gone, and how to end them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from labkit.cli.doctor.diagnosis import Diagnosis
from labkit.cli.doctor.machine import clusters
from labkit.cluster.lease import Lease
from labkit.common.files import runtime_folder
from labkit.records import store

KEEPER = "import sys; from pathlib import Path; from labkit.cluster.lease import Lock"
KEEPS = f"{KEEPER}; lock = Lock(Path(sys.argv[1])); lock.acquire(); print(); sys.stdin.read()"
IDLES = "import sys; print(); sys.stdin.read()"
Start = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a cluster whose state is "ready"."""
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path))
    own = runtime_folder("clusters") / "mine"
    own.mkdir()
    store.write_json(own / "cluster.json", {"state": "ready", "pid": 12345})
    return own


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts Python with a script; the process ends with the test."""
    children = []

    def process(*arguments: object, **variables: str) -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | variables,
        )
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()  # the process is running
        return child.pid

    yield process
    for child in children:
        child.communicate()


def test_none_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_RUNTIME", str(tmp_path))
    assert list(clusters()) == [
        Diagnosis("ok", "clusters: no cluster is running, and none has left processes or files")
    ]


def test_one_that_is_held_says_by_whom_and_stays_held(folder: Path, start: Start) -> None:
    start(KEEPS, folder / "keeper.lock")
    lease = Lease(folder)
    (found,) = clusters()
    held = (
        f"clusters: mine: running, in use by process {os.getpid()}; the cluster ends when no "
        "process uses it"
    )
    assert found == Diagnosis("ok", held)
    asks = f"{KEEPER}; print(Lock(Path(sys.argv[1])).is_held())"
    said = subprocess.run(
        [sys.executable, "-c", asks, str(lease.path)], capture_output=True, text=True, check=True
    )
    lease.release()
    assert said.stdout == "True\n"


def test_one_whose_kernel_is_gone_says_how_to_end_it(folder: Path, start: Start) -> None:
    start(KEEPS, folder / "keeper.lock")
    (folder / "leases").mkdir()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    (folder / "leases" / f"{int(gone.stdout)}-0a1b2c3d").touch()
    (found,) = clusters()
    assert (found.state, found.fix) == ("note", "kill 12345")
    assert "running, but no process uses it" in found.what


def test_engines_that_have_outlived_their_keeper_are_named(folder: Path, start: Start) -> None:
    pid = start(IDLES, "labkit.cluster.engine", LABKIT_KEEPER=str(folder / "keeper.lock"))
    (found,) = clusters()
    assert (found.state, found.fix) == ("note", f"kill -9 {pid}")


def test_what_a_killed_keeper_has_left_can_go(folder: Path) -> None:
    (found,) = clusters()
    assert (found.state, found.fix) == ("note", f"rm -r {folder}")
