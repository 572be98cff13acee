"""Test that no other machine can reach a local cluster, and no other user can read its data."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import zmq
from listening import open_to_others, watched

from labkit import AllReduce, Cluster, Experiment
from labkit.cluster.processes import Listener, confine, exposed_listeners, listeners

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone hands over sockets")


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("fe80::1", False),
    ],
)
def test_loopback_alone_is_local(address: str, is_local: bool) -> None:
    assert Listener(3, address, 80).is_local is is_local


# The program waits on sockets as mpiexec does; it would print a line if they were closed.
SERVER = """
import select, socket
ends = [socket.create_server(("0.0.0.0", 0))]
ends += [socket.create_server(("::", 0), family=socket.AF_INET6)] if socket.has_ipv6 else []
print(len(ends), flush=True)
for end in select.select(ends, [], [])[0]:
    print(end.accept()[0].recv(5).decode(), flush=True)
"""


@LINUX
def test_a_child_that_listens_everywhere_goes_on_on_loopback() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        count, process = int(child.stdout.readline()), psutil.Process(child.pid)
        before = {each.port for each in exposed_listeners(process)}
        assert len(before) == count
        assert confine(process)
        assert exposed_listeners(process) == []
        assert {listener.port for listener in listeners(process)} == before
        assert not confine(process)  # nothing remains to be confined
        ports = {listener.address: listener.port for listener in listeners(process)}
        with socket.create_connection(("127.0.0.1", ports["127.0.0.1"])) as there:
            there.sendall(b"hello")
        assert child.stdout.read() == "hello\n"


@LINUX
def test_nobody_of_this_machine_reaches_a_child_that_was_made_deaf() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        confine(psutil.Process(child.pid), drop_packets=True)
        for listener in listeners(psutil.Process(child.pid)):
            with pytest.raises(TimeoutError):
                socket.create_connection((listener.address, listener.port), timeout=0.2)
        assert child.poll() is None
        child.kill()


@LINUX
def test_a_cluster_of_this_machine_listens_on_loopback_alone(cluster: Cluster) -> None:
    assert list(open_to_others()) == []
    with watched() as found:
        cluster.run(
            Experiment(dataset="digits", workers=2, steps_per_epoch=4, strategy=AllReduce())
        )
    assert found == set()


def test_who_has_no_key_reads_nothing_of_what_ranks_print(cluster: Cluster) -> None:
    folder = cluster.folder / "profile" / "security"
    known = json.loads((folder / "ipcontroller-labkit-client.json").read_text())
    with zmq.Context() as context, context.socket(zmq.SUB) as spy:
        spy.linger = 0
        spy.subscribe(b"")
        spy.connect(f"tcp://127.0.0.1:{known['iopub']}")
        for _ in range(3):  # a subscription takes effect after a delay
            cluster.view.execute("print('a secret')", block=True)
            assert not spy.poll(200)


def test_files_of_mpiexec_lie_in_the_folder_of_its_cluster(cluster: Cluster) -> None:
    folder = cluster.folder / "mpiexec"
    assert folder.stat().st_mode & 0o077 == 0
    assert any(Path(folder).iterdir())
