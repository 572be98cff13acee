"""Test warm engines: one matching cluster takes them once, finds them fresh, and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from left import PATIENCE, left_of
from listening import watched

from labkit import Cluster
from labkit.cli.app import app
from labkit.cluster import launch, warm
from labkit.cluster import lease as cluster_name
from labkit.cluster.lease import KEEPER, WARM, Lease, release_warm_lease
from labkit.cluster.start import Start
from labkit.common import imports
from labkit.common.errors import LabkitError
from labkit.records import store

# A process that uses a cluster, and prints what it finds on the ranks and the trained weights.
COMES = """
import hashlib, json, os, sys, time
import labkit

experiment = labkit.Experiment(
    model="mlp", dataset="digits", dataset_options={"rows": 256, "test_rows": 64},
    workers=2, epochs=2, batch_size=64, strategy=labkit.AllReduce(),
)

def found():
    import os, sys
    return os.getcwd(), dict(os.environ), sys.path

with labkit.Cluster(workers=2, name=sys.argv[1] or None) as cluster:
    if len(sys.argv) > 2:  # until another has come, too
        open(sys.argv[2], "w").close()
        while len(os.listdir(os.path.dirname(sys.argv[2]))) < 2:
            time.sleep(0.05)
    names = cluster.view.apply_sync(lambda: sorted(k for k in globals() if k[0] != "_"))
    engines = cluster.view.apply_sync(os.getpid)
    run = cluster.run(experiment, show=False)
    there = cluster.view.apply_sync(found)  # now, when TensorFlow has set what it sets
    weights = [each.tobytes() for each in run.model().get_weights()]
    print(json.dumps({
        "there": there, "names": names, "engines": engines,
        "losses": run.history["loss"].tolist(), "accuracy": run.metrics["test_accuracy"],
        "weights": hashlib.sha256(b"".join(weights)).hexdigest(),
    }))
"""
KEPT_WARM = "2 MPI engines, already warm after a start of"
# Locks a cluster's folder until it receives a line.
HOLDS = """
import sys, time
from pathlib import Path
from labkit.cluster.lease import locked
from labkit.records import store

folder = Path(sys.argv[1])
with locked(folder / sys.argv[2]):
    print(flush=True)
    sys.stdin.readline()
    time.sleep(0.2)
"""
# Prefixes of variables that differ between two starts: ports, addresses and process IDs.
OWN = ("LABKIT_KEEPER", "IPP_", "OMPI_", "PMIX_", "PRTE_", "_")


def comes(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMES, *(arguments or ("",))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(child: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    out, err = child.communicate(timeout=280)
    assert child.returncode == 0, err
    return json.loads(out), err


def as_found(record: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a record that are equal for every start."""
    there = [
        [folder, {k: v for k, v in own.items() if not k.startswith(OWN)}, path]
        for folder, own, path in record["there"]
    ]
    return record | {"there": there, "engines": None}


@contextmanager
def holder(folder: Path, lock: str, then: str = "") -> Iterator[None]:
    """Hold a lock in another process, which runs `then` soon, while this process waits."""
    command = [sys.executable, "-c", HOLDS + then, str(folder), lock]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        if then:
            assert child.stdin is not None
            print(file=child.stdin, flush=True)
        yield


def gone() -> int:
    """Return the ID of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        return child.pid


def wait_for(folder: Path, state: str | None) -> None:
    end = time.monotonic() + PATIENCE
    while (said := warm.read_status(folder)) is None or said["state"] != state:
        if said is None and state is None:
            return
        assert time.monotonic() < end, said
        time.sleep(0.1)


# --- who takes what ------------------------------------------------------------------------------


def test_a_cluster_is_taken_from_who_keeps_it_warm_once(tmp_path: Path) -> None:
    lease, other = Lease(tmp_path, WARM), Lease(tmp_path)
    release_warm_lease(tmp_path)
    assert (lease.path.exists(), other.path.exists()) == (False, True)
    lease.release()
    other.release()


@pytest.mark.parametrize(
    "other",
    [
        {"workers": 3},
        {"threads": 2},
        {"fault_tolerant": True},
        {"fault_tolerant": True, "spares": 1},
    ],
)
def test_another_shape_has_another_name(other: dict[str, Any]) -> None:
    assert cluster_name.default_name(Start(**{"workers": 2} | other)) != cluster_name.default_name(
        Start(2)
    )


def test_engines_that_have_read_other_variables_or_run_other_code_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = cluster_name.default_name(Start(2))
    same = {"OMPI_MCA_btl": "tcp,self"}  # variables that labkit sets for every start
    same |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": "/x", "MPLBACKEND": "agg"}
    other = {"XLA_FLAGS": "--xla_dump_to=x", "PYTHONOPTIMIZE": "2", "LC_ALL": "C", "LANG": "xx"}
    for name, value in (same | other).items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert (cluster_name.default_name(Start(2)) == usual) == (name in same), name
    for name in ("version", "fingerprint"):
        with monkeypatch.context() as patch:
            patch.setattr(cluster_name, name, lambda *_: "another")
            assert cluster_name.default_name(Start(2)) != usual, name


def test_a_relative_folder_of_modules_is_another_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/lib")
    here = cluster_name.default_name(Start(2))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'src'}{os.pathsep}/lib")
    assert cluster_name.default_name(Start(2)) == here
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/lib")
    monkeypatch.chdir("/")
    assert cluster_name.default_name(Start(2)) != here
    assert cluster_name.absolute({"PYTHONPATH": "src", "PATH": "bin"}) == {
        "PYTHONPATH": "/src",
        "PATH": "bin",
    }
    assert cluster_name.absolute({"PYTHONPATH": ""}) == {"PYTHONPATH": ""}  # Python: none


def test_who_settles_finds_its_own_variables_and_none_of_another_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own := tmp_path / "own").mkdir()
    theirs = {"LABKIT_DATA": "/theirs", "TMPDIR": "/theirs", "PATH": "/theirs"}
    set_since = {"OMPI_COMM_WORLD_RANK": "0", "TERM": "xterm-color", KEEPER: "its"}
    mine = {"PATH": "/mine", "LABKIT_CACHE": "/mine", "EDITOR": "ed", "TERM": "dumb"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", theirs | set_since)
        patch.setattr(sys, "path", ["/lib"])
        mine[imports.VARIABLE] = "/mine"
        warm.adopt_environment(
            str(own), mine | {KEEPER: "of a cluster that this one is started from"}
        )
        assert os.environ == mine | set_since
        assert sys.path == ["/lib", "/mine"]
    assert Path.cwd() == own


@pytest.mark.heavy  # a process
def test_who_comes_while_another_settles_waits_and_does_not_settle_again(tmp_path: Path) -> None:
    (tmp_path / launch.UNSETTLED).touch()
    with holder(tmp_path, "start.lock", f'    (folder / "{launch.UNSETTLED}").unlink()'):
        warm.claim_warm_engines(tmp_path, None)  # would ask the engines, which do not exist here
    assert not (tmp_path / launch.UNSETTLED).exists()


@pytest.mark.heavy  # a process
def test_a_start_that_another_has_given_up_is_waited_for(tmp_path: Path) -> None:
    store.write_json(tmp_path / "cluster.json", {"state": "starting", "message": ""})
    ready = '    store.write_json(folder / "cluster.json", {"state": "ready"}); sys.stdin.read()'
    with holder(tmp_path, "keeper.lock", ready):
        launch.launch(tmp_path, Start(1))
    assert not (tmp_path / "keeper.log").exists()  # no second keeper process was started


@pytest.mark.heavy  # a process
def test_who_keeps_them_may_end_while_it_is_told_to(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := cluster_name.folder_of("1x1")).mkdir()
    store.write_json(folder / warm.FILE, {"workers": 1, "threads": 1, "pid": gone()})
    monkeypatch.setattr(warm, "ENDS", 0.0)
    with holder(folder, warm.LOCK), pytest.raises(LabkitError, match="did not end"):
        warm.stop()  # the lock decides, not the signal


def test_memory_is_told_although_engines_have_just_ended() -> None:
    assert warm.memory(gone()) > 0  # this process's


# --- on real engines -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)  # four starts with TensorFlow on a busy machine
def test_one_user_takes_warm_engines_and_finds_what_fresh_ones_have(
    own_runtime: Path, tmp_path: Path
) -> None:
    folder = cluster_name.folder_of(cluster_name.default_name(Start(2)))
    first = CliRunner().invoke(app, ["prestart"], env={"LABKIT_PEERS": "/of/this/terminal"})
    assert first.output.startswith("warm after"), first.output
    again = CliRunner().invoke(app, ["prestart", "--minutes", "5"])
    assert again.output.startswith("engines are already warm: 2 ranks of 1 thread"), again.output
    said = warm.read_status(folder)
    assert said is not None
    assert said["bytes"] > 2 * 100 * 2**20

    with Cluster(workers=1) as smaller:  # another shape, so the warm engines stay unused
        assert smaller.state()["warm"] is None
    assert warm.read_status(folder) == said

    # Two processes come at the same time: one takes the warm engines, and the other attaches to the
    # same cluster.
    (tmp_path / "both").mkdir()
    both = [comes("", str(tmp_path / "both" / name)) for name in ("a", "b")]
    (one, err), (other, other_err) = map(told, both)
    assert (KEPT_WARM in err) + (KEPT_WARM in other_err) == 1
    assert one["engines"] == other["engines"]

    wait_for(folder, WARM)  # behind them
    taken, err = told(comes())
    assert KEPT_WARM in err
    assert not set(taken["engines"]) & set(one["engines"])
    fresh, err = told(comes("fresh"))
    assert KEPT_WARM not in err
    assert as_found(taken) == as_found(fresh)

    wait_for(folder, WARM)
    with Cluster(workers=2) as mine:
        assert [each["workers"] for each in warm.stop(workers=2, threads=1)] == [2]
        assert mine.call(lambda communicator: communicator.rank) == [0, 1]
        assert mine.state()["warm"]
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_what_nobody_takes_ends_after_its_time_or_when_told(own_runtime: Path) -> None:
    folder = cluster_name.folder_of(cluster_name.default_name(Start(1)))
    with watched() as open_to_others:
        said, already = warm.start(Start(1), idle=1)
        assert (said["state"], already) == ("warm", False)
        wait_for(folder, None)
    assert open_to_others == set()
    assert left_of(own_runtime) == []
    warm.start(Start(1), idle=600)
    assert warm.stop(workers=2) == []
    assert CliRunner().invoke(app, ["prestart", "--stop"]).output == "ended: 1 rank of 1 thread\n"
    # The engines are already gone when the command returns.
    assert left_of(own_runtime, patience=0) == []
    assert (
        "no warm engines have the given --workers and --threads"
        in CliRunner().invoke(app, ["prestart", "--stop"]).output
    )


@pytest.mark.slow
def test_a_start_that_was_given_up_ends_as_if_who_waits_had_begun_it(
    own_runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := cluster_name.folder_of(cluster_name.default_name(Start(1)))).mkdir()
    command = [sys.executable, "-m", "labkit.cluster.warm", str(folder), Start(1).to_json(), "600"]
    with subprocess.Popen(command, cwd=folder) as warms:
        while launch.state(folder)["state"] != "starting":
            assert warms.poll() is None
            time.sleep(0.05)
        keeper, here = launch.state(folder)["pid"], os.getcwd()
        lease = Lease(folder)  # holds the start lock, for which others now wait
        warms.terminate()
        assert warms.wait(PATIENCE) == 0
    with Cluster(workers=1) as first:
        lease.release()
        assert first.state()["pid"] == keeper
        assert first.state()["warm"]
        assert first.view.apply_sync(os.getcwd) == [here]
        monkeypatch.chdir("/")
        with Cluster(workers=1) as second:  # it finds the engines running and already used
            assert second.view.apply_sync(os.getcwd) == [here]
    assert left_of(own_runtime) == []


@pytest.mark.slow
def test_kill_9_of_who_keeps_them_warm_leaves_nothing(own_runtime: Path) -> None:
    said, _ = warm.start(Start(1), idle=600)
    os.kill(said["pid"], signal.SIGKILL)
    assert left_of(own_runtime) == []
