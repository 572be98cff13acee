"""Test that a cluster starts although another program has just taken a free port."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from left import left_of

from labkit.cluster.keeper import ClusterKeeper, Engines
from labkit.cluster.processes import SESSIONS, has_exited
from labkit.cluster.start import Start
from labkit.common.errors import LabkitError

# The first controller gets a port on which another program already listens.
START = """
import socket, sys
from pathlib import Path
from labkit.cluster import keeper
from labkit.cluster.lease import Lock
from labkit.cluster.start import Start
from labkit.common.errors import LabkitError

taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
ports = [each.getsockname()[1] for each in taken]
real, starts = keeper.ipp.Cluster, []
heard = Start(1).command("", ())
said = "The PMIx server's listener thread failed to start. We cannot continue."
fails = {"deaf": f'echo "{said}"; exit 213', "unheard": "exit 213"}

def cluster(**options):
    unlucky = len(starts) < int(sys.argv[2])
    if sys.argv[3] in fails:
        command = ["sh", "-c", fails[sys.argv[3]], "mpiexec"]
        keeper.Engines.mpi_cmd = command if unlucky else heard
    elif unlucky:
        told = f"--IPController.hb=({ports[0]},{ports[1]})"
        options["controller_args"] = [*options["controller_args"], told]
    starts.append(options)
    return real(**options)

keeper.ipp.Cluster = cluster
folder = Path(sys.argv[1])
lock = Lock(folder / "keeper.lock")
assert lock.acquire()
# What an earlier keeper's controller has said is nothing of this one's.
(folder / "controller.log").write_text("Address already in use")
one = keeper.ClusterKeeper(folder, Start(1))
try:
    one.start()
    print(len(starts), one.engines)
finally:
    one.stop()
"""


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize(
    ("unlucky", "of", "told"),
    [
        (3, "controller", "4 [0]"),
        (1, "deaf", "2 [0]"),
        (1, "unheard", "2 [0]"),
        pytest.param(9, "controller", "controller, in each of 5", marks=pytest.mark.slow),
        pytest.param(9, "deaf", "failed to start, in each of 5", marks=pytest.mark.slow),
        pytest.param(9, "unheard", "no output, in each of 5", marks=pytest.mark.slow),
    ],
)
def test_what_was_unlucky_as_it_started_is_started_anew(
    tmp_path: Path, unlucky: int, of: str, told: str
) -> None:
    command = [sys.executable, "-c", START, str(tmp_path), str(unlucky), of]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert told in done.stdout + done.stderr
    assert (done.returncode == 0) == (unlucky < 9)


def test_a_keeper_for_whose_engines_nobody_waits_does_not_start_them(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "labkit.cluster.keeper", str(tmp_path), Start(8).to_json()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert "no process waits for the engines" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keeper.lock", "start.lock"]


# The caller starts a cluster and is killed; processes that remain are found by inherited variables.
CALLER = "import labkit; labkit.Cluster(workers=4)"


def test_a_caller_that_is_killed_while_ranks_start_leaves_nothing(
    own_runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = tmp_path / "sessions"
    sessions.mkdir()
    monkeypatch.setenv(SESSIONS, str(sessions))
    with subprocess.Popen([sys.executable, "-c", CALLER]) as caller:
        # The controller accepts connections now; mpiexec starts next.
        while not list(own_runtime.rglob("ipcontroller-labkit-engine.json")):
            assert caller.poll() is None
            time.sleep(0.01)
        caller.kill()
    assert left_of(own_runtime) == []
    files = [path.name for path in own_runtime.rglob("*") if path.is_file()]
    assert sorted(files) == ["keeper.lock", "start.lock"]
    assert [path.name for path in sessions.iterdir()] == []


@pytest.mark.parametrize(
    ("outlives", "code", "dead", "expected"),
    [(True, 0, [], 0), (True, 0, [1, 0], 1), (True, -9, [1], None), (False, 0, [], None)],
)
def test_ranks_that_have_all_died_end_an_mpiexec_that_says_nothing_of_them(
    tmp_path: Path, outlives: bool, code: int, dead: list[int], expected: int | None
) -> None:
    keeper = ClusterKeeper(tmp_path, Start(2, fault_tolerant=outlives))
    keeper.dead = dead
    end = keeper._end_of_all(code)
    assert (None if end is None else end.rank) == expected


def test_sockets_that_cannot_be_looked_at_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(keeper: ClusterKeeper) -> psutil.Process:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(ClusterKeeper, "_mpiexec", hidden)
    monkeypatch.setattr(ClusterKeeper, "_check_start", lambda keeper: None)  # it runs
    with pytest.raises(
        LabkitError, match=r"listens on every network interface.*trusted_network=True"
    ):
        ClusterKeeper(tmp_path, Start(2))._confine()


# An mpiexec whose ranks end at different times; like a site's wrapper script, it has a child that
# also ends.
OUTLIVES = "sleep 601 & other=$!; sleep 600 & echo $!; read go; kill $other; read go; wait"


def test_a_rank_that_dies_before_all_are_ready_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engines, "engine_cmd", ["sleep", "600"])
    keeper = ClusterKeeper(tmp_path, Start(2, fault_tolerant=True))
    piped: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", OUTLIVES], **piped) as mpiexec:
        keeper.cluster = SimpleNamespace(engine_set=mpiexec)
        rank = int(mpiexec.stdout.readline())
        (other,) = [each for each in psutil.Process(mpiexec.pid).children() if each.pid != rank]
        while other.cmdline() != ["sleep", "601"] or psutil.Process(rank).name() != "sleep":
            time.sleep(0.01)
        assert not keeper._has_lost_rank()
        mpiexec.stdin.write(b"\n")
        mpiexec.stdin.flush()
        end = time.monotonic() + 60
        while not has_exited(other):
            assert time.monotonic() < end
        assert not keeper._has_lost_rank()
        os.kill(rank, signal.SIGKILL)
        while not keeper._has_lost_rank():
            assert time.monotonic() < end
        mpiexec.kill()
