"""Test clusters on two hosts, by mpiexec and Slurm: one world or an error, with no leftovers."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import psutil
import pytest

import labkit as lk
from labkit.cluster.calls import RankError
from labkit.cluster.cluster import leftovers
from labkit.cluster.engine import CONNECTION, command
from labkit.cluster.start import Start
from labkit.communicator import Communicator
from labkit.hosts import Testbed
from labkit.hosts.host_list import login
from labkit.hosts.queue import Queue
from labkit.records import store
from labkit.records.stream import FOLDER, StreamReader

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OURS = "labkit.cluster|prted|prterun"  # command lines of a cluster's processes on hosts
HANG = 60.0  # seconds after which an immediate action counts as missing

WAYS: dict[str, dict[str, Any]] = {
    "hosts": {"hosts": ["a:2", "b:2"]},
    "salloc": {"workers": 4, "nodes": 2},
    "srun": {"workers": 4, "nodes": 2, "launch_command": "srun"},
}

IN_TURN = WAYS["hosts"] | {"map_by": "node"}
PAIR = {"workers": 2, "nodes": 2}
SMALL: dict[str, Any] = {"hosts": ["a:1", "b:1"]}
STEP = PAIR | {"launch_command": "srun"}
APART = STEP | {"options": "--mpi=none"}


def where(communicator: Communicator) -> tuple[int, str]:
    import socket

    return communicator.rank, socket.gethostname()


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def left_on(bed: Testbed) -> str:
    """Return the command lines of cluster processes that still run on the hosts."""
    return "".join(bed.run(host, ["pgrep", "-af", OURS]).stdout for host in bed.hosts)


def listening(cluster: lk.Cluster) -> set[str]:
    """Return the addresses on which Python processes under the cluster's keeper process listen."""
    found = psutil.Process(cluster.state()["pid"]).children(recursive=True)
    return {
        connection.laddr.ip
        for process in found
        if "python" in process.name()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def has_folder(bed: Testbed, host: str) -> bool:
    """Return whether a guest process has a folder on this host."""
    return "labkit-" in bed.run(host, ["ls", "/tmp"]).stdout


@pytest.fixture(autouse=True)
def nothing_left(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)  # all hosts see this folder
    shapes = *WAYS.values(), IN_TURN, APART, PAIR, STEP, SMALL
    own = [Start.from_options(**more).name for more in shapes]
    yield
    # Parallel workers of this test suite have their own clusters and testbeds.
    wait_for(lambda: not left_on(bed) and not [n for n in leftovers() if n.startswith(tuple(own))])
    # A Slurm job ends in several steps.
    wait_for(lambda: bed.login(["squeue", "--noheader"]).stdout == "")
    wait_for(lambda: not any(has_folder(bed, host) for host in bed.hosts))


@pytest.mark.parametrize("way", WAYS)
def test_ranks_are_one_world_that_ends_with_its_keeper(bed: Testbed, way: str) -> None:
    with lk.Cluster(**WAYS[way]) as cluster:
        assert cluster.call(where) == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
        assert left_on(bed)
        # Labkit's processes listen on the address that hosts reach, and on loopback for each other.
        assert listening(cluster) == {bed.addresses["login"], "127.0.0.1"}
        os.kill(cluster.state()["pid"], signal.SIGKILL)
        wait_for(lambda: cluster.how_ended() is not None)


def test_two_worlds_of_one_are_an_error_that_says_which_part_is_missing() -> None:
    with pytest.raises(lk.LabkitError, match=r"form 2 worlds of 1.*srun --mpi=list"):
        lk.Cluster(**APART)


def test_a_guest_that_is_killed_while_it_starts_leaves_no_folder(bed: Testbed) -> None:
    _, guest = command([], is_local=False)
    ours = "^[^ ]*python[^ ]* -P -m labkit.cluster.engine guest"
    # The pattern matches the process that removes this guest's folder: no earlier guest's, and not
    # this search.
    tidies = "[k]ill -0 .* $guest .*/labkit-"
    found = f"guest=$(pgrep -f '{ours}') && pgrep -f \"{tidies}\""
    killing = f"until {found}; do sleep 0.01; done; kill -KILL $guest"
    with socket.create_server((bed.addresses["login"], 0)) as controller:
        there = {"location": bed.addresses["login"], "registration": controller.getsockname()[1]}
        environment = os.environ | {CONNECTION: json.dumps(there)}
        words = bed.command("a", [*guest, f"--IPEngine.timeout={2 * HANG}"])
        with subprocess.Popen(words, env=environment, cwd=ROOT) as started:
            # The search runs on the guest's own host at once; the guest finds a silent controller
            # and waits to be killed.
            assert bed.run("a", ["sh", "-c", killing], timeout=HANG).returncode == 0
    assert started.returncode != 0


def test_what_waits_in_the_queue_is_told_and_leaves_it_with_its_cluster(
    bed: Testbed, shared_folder: Path
) -> None:
    queue = Queue(login())
    bed.login(["sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300"])
    words = "import labkit as lk; lk.Cluster(workers=4, nodes=2)"
    said = shared_folder / "said"
    with said.open("w") as file:
        waiting = subprocess.Popen([sys.executable, "-c", words], stderr=file)
    try:
        wait_for(lambda: "waits in partition all" in said.read_text())
    finally:
        waiting.kill()  # no test needs this waiting process any more
        waiting.wait()
        wait_for(lambda: len(bed.login(["squeue", "--noheader"]).stdout.splitlines()) == 1)
        queue.cancel(name="wrap")


@pytest.mark.parametrize("by", ["scancel", "a failed node"])
def test_a_job_that_ends_early_says_why_in_the_record(
    bed: Testbed, shared_folder: Path, by: str
) -> None:
    experiment = lk.Experiment(dataset="digits", workers=2, epochs=10_000)
    with lk.Cluster(**PAIR) as cluster:
        live = cluster.submit(experiment)
        number = bed.login(["squeue", "--noheader", "--format=%i"]).stdout.split()[0]
        try:
            if by == "scancel":
                bed.login(["scancel", number])
            else:
                bed.login(["scontrol", "update", "nodename=b", "state=down", "reason=test"])
            told = {"scancel": "it was cancelled", "a failed node": "a node failed"}[by]
            with pytest.raises(RankError, match=told):
                live.result()
        finally:
            bed.login(["scontrol", "update", "nodename=b", "state=resume"])
        status = store.read_status(live.directory)
        assert (status["state"], told in status["cause"]) == ("failed", True)
    wait_for(lambda: "down" not in bed.login(["sinfo", "--noheader"]).stdout)


def die(communicator: Communicator) -> None:
    """Kill the last rank while the others wait for it at a barrier."""
    import os
    import signal

    if communicator.rank == communicator.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    communicator.barrier("the end")


def test_ranks_dealt_out_in_turn_are_used_from_another_machine_which_is_told_of_their_end(
    bed: Testbed, shared_folder: Path
) -> None:
    uses = (
        "import labkit as lk, sys, json\n"
        "with lk.Cluster.attach(sys.argv[1]) as cluster:\n"
        "    print(json.dumps(cluster.call(lambda c: c.rank)))"
    )
    copy = shared_folder / "attach.json"
    command = [sys.executable, "-c", uses, str(copy)]
    with lk.Cluster(**IN_TURN) as cluster:
        assert cluster.call(where) == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
        file = cluster.attach_file
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        copy.touch(0o600)
        copy.write_text(file.read_text())
        done = bed.run("a", command, cwd=ROOT, timeout=HANG)
        assert json.loads(done.stdout) == [0, 1, 2, 3], done.stderr
        with pytest.raises(RankError, match="rank 3 was ended by SIGKILL"):
            cluster.call(die)
    wait_for(lambda: cluster.name not in leftovers())
    ended = bed.run("a", command, cwd=ROOT, timeout=HANG)
    assert ": the cluster's controller does not answer" in ended.stderr


def test_a_folder_that_hosts_do_not_see_serves_as_well_as_one_that_they_share(
    bed: Testbed,
    shared_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = f"from __future__ import annotations\n\nNUMBER = 6\n\n{inspect.getsource(where)}"
    (tmp_path / "beside_it.py").write_text(module)
    ring = lk.AllReduce(algorithm="ring")  # the algorithm "auto" may differ between two runs
    experiment = lk.Experiment(model="linear", strategy=ring, workers=2, epochs=1, verify=False)
    exact = ["rank", "step", "loss", "samples", "payload_bytes", "messages"]

    def times(communicator: Communicator) -> tuple[int, Path]:
        import beside_it

        return beside_it.NUMBER * communicator.rank, Path.cwd()

    with lk.Cluster(**SMALL) as cluster:
        shared = cluster.run(experiment)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("LABKIT_JOB", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        assert all(bed.run(host, ["ls", str(tmp_path)]).returncode for host in bed.hosts)
        (_, first), (number, second) = cluster.call(times)  # a function that imports the module
        assert (number, len({first, second, tmp_path})) == (6, 3)
        beside_it = importlib.import_module("beside_it")
        assert cluster.call(beside_it.where) == [(0, "a"), (1, "b")]  # and an imported function

        live = cluster.submit(experiment)
        run = live.result()
        assert run.history[exact].equals(shared.history[exact])
        told = pandas.DataFrame(live.rows)[exact].sort_values(["rank", "step"], ignore_index=True)
        assert told.equals(shared.history[exact].sort_values(["rank", "step"], ignore_index=True))
        assert len(live.epochs) == 1
        assert cluster.predict(run, np.ones((3, 8, 8, 1), np.float32)).shape == (3, 10)

        endless = cluster.submit(experiment.replace(epochs=10_000))
        wait_for(lambda: len(endless.rows) > 0)
        StreamReader(endless.directory / FOLDER).stop()  # as another process requests it
        assert endless.result().status["state"] == "interrupted"
    assert "signing" not in caplog.text


def test_a_notebook_goes_to_hosts_by_the_environment_and_is_told_who_dies_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LABKIT_LAUNCHER", "slurm")
    monkeypatch.setenv("LABKIT_NODES", "2")
    with lk.Cluster(workers=2, launch_command="srun") as cluster:
        assert cluster.call(where) == [(0, "a"), (1, "b")]
        with pytest.raises(RankError, match=r"b: tasks? .*1: Killed"):
            cluster.call(die)


def test_slurms_daemon_is_killed_and_the_job_goes_on(bed: Testbed) -> None:
    def go_on(communicator: Communicator) -> int:
        for _ in range(20):
            communicator.clock.sleep(0.1)
            communicator.barrier("a step")
        return communicator.rank

    with lk.testbed() as other:
        with lk.Cluster(**PAIR) as cluster:
            other.run("b", ["pkill", "-KILL", "-x", "slurmd"])
            assert cluster.call(go_on) == [0, 1]
        wait_for(lambda: any(node.trouble for node in Queue(login()).nodes()))
        with pytest.raises(lk.LabkitError, match=r"node b is .* does not answer"):
            lk.Cluster(**PAIR, options="--immediate=5")


def test_a_script_under_srun_is_one_world_or_told_that_it_is_not(bed: Testbed) -> None:
    script = "from labkit.communicator import world; print(world().size)"
    options = ["srun", "-N2", "--ntasks-per-node=1"]
    words = [sys.executable, "-c", script]
    environment = {k: v for k, v in os.environ.items() if k != "OMPI_MCA_btl"}
    for mpi, told in (("pmix", "2\n2\n"), ("none", "")):
        done = bed.login([*options, f"--mpi={mpi}", *words], env=environment, timeout=HANG)
        assert done.stdout == told, done.stderr
    assert "srun has started 2 ranks (SLURM_STEP_NUM_TASKS=2) without pmix" in done.stderr
