"""Test that engines are forked from a process that has imported TensorFlow."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from left import PATIENCE

from labkit import Cluster
from labkit.cluster import fork_server
from labkit.common.files import runtime_folder
from labkit.common.locks import Lock
from labkit.communicator import Communicator


def context(communicator: Communicator) -> tuple[str, float, int, str]:
    import numpy

    mask = os.umask(0)
    os.umask(mask)
    name = Path("/proc/self/comm").read_text().strip()
    return name, numpy.random.rand(), mask, os.environ.get("LABKIT_KEEPER", "")


@pytest.fixture(scope="module")
def forked() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fork_server.VARIABLE, "900")
        with Cluster(workers=2, name="forked") as cluster:
            yield cluster


@pytest.mark.exhaustive
def test_forked_ranks_have_the_context_of_their_cluster(forked: Cluster) -> None:
    told = forked.call(context)
    assert {name for name, *_ in told} == {fork_server.NAME.decode()}
    mask = os.umask(0)
    os.umask(mask)
    assert {each for *_, each, _ in told} == {mask}
    assert {Path(keeper).name for *_, keeper in told} == {"keeper.lock"}


def client(**more: str) -> subprocess.Popen[str]:
    """Start a client of the session's server; without a keeper, its engine fails at once."""
    (folder,) = {path.parent for path in runtime_folder("fork").glob(f"*/{fork_server.PID}")}
    return subprocess.Popen(
        [*fork_server.CLIENT, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **more},
        text=True,
    )


@pytest.mark.exhaustive
def test_a_client_ends_as_its_engine_and_shows_its_output(forked: Cluster) -> None:
    process = client()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "KeyError: 'LABKIT_KEEPER'" in errors


def engine_of(before: set[int]) -> psutil.Process:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for process in psutil.process_iter(["name"]):
            named = process.info["name"] == fork_server.NAME.decode()
            if named and process.pid not in before:
                return process
        time.sleep(0.02)
    raise AssertionError("no engine was forked")


def engines() -> set[int]:
    names = psutil.process_iter(["name"])
    return {each.pid for each in names if each.info["name"] == fork_server.NAME.decode()}


@pytest.mark.alone  # other tests fork engines, too
@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_engine_ends_with_its_client_also_while_it_is_suspended(
    forked: Cluster, own_runtime: Path, number: signal.Signals
) -> None:
    before = engines()
    lock = Lock(own_runtime / "keeper.lock")
    assert lock.acquire()
    process = client(LABKIT_KEEPER=str(lock.path))
    engine = engine_of(before)
    if number == signal.SIGKILL:
        engine.suspend()
    process.send_signal(number)
    assert process.wait(PATIENCE) == -number
    engine.wait(PATIENCE)
    lock.release()


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["0", "1"])
def test_ranks_start_without_a_server_and_an_idle_server_ends(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    (own_runtime / f"labkit-{os.getuid()}" / "fork").unlink()  # no server of other tests
    monkeypatch.setenv(fork_server.VARIABLE, setting)
    with Cluster(workers=2) as cluster:
        (name, first, *_), (_, second, *_) = cluster.call(context)
    assert (name == fork_server.NAME.decode()) == (setting == "1")
    assert first != second  # each rank has its own seed
    sockets = list(runtime_folder("fork").glob(f"*/{fork_server.SOCKET}"))
    assert len(sockets) == int(setting)
    end = time.monotonic() + PATIENCE
    while any(path.exists() for path in sockets):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", fork_server.VARIABLE])
def test_ranks_are_not_forked_in_a_slurm_job_or_when_told(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(fork_server.VARIABLE, "900")
    assert fork_server.is_usable()
    monkeypatch.setenv(name, "0")
    assert not fork_server.is_usable()
