"""Test two hosts: isolated from each other, joined by their link, and under MPI and Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import labkit as lk
from labkit.hosts import Testbed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]  # all hosts see this folder, but not a test's temporary one
WORLD = [sys.executable, str(Path(__file__).with_name("sample_world.py"))]
Mpirun = Callable[..., subprocess.CompletedProcess[str]]
HOST_OWN = ("net", "uts", "mnt", "ipc", "pid")
PAYLOAD = 2**23  # bytes

# This program receives bytes on a port and prints how many.
TAKES = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    print(sum(iter(lambda: len(connection.recv(2**20)), 0)))
"""
SENDS = """
import socket, sys, time
begin = time.perf_counter()
with socket.create_connection((sys.argv[1], 5000), float(sys.argv[3])) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.perf_counter() - begin)
"""


def sent_between(bed: Testbed, one: str, other: str, nbytes: int) -> float:
    """Send bytes from one host to another; return the seconds until the last byte is read."""
    taker = subprocess.Popen(
        bed.command(other, [sys.executable, "-c", TAKES]), stdout=subprocess.PIPE, text=True
    )
    with taker:
        assert taker.stdout is not None
        assert taker.stdout.readline() == "listening\n"
        # The sender uses the host name in /etc/hosts.
        done = bed.run(one, [sys.executable, "-c", SENDS, other, str(nbytes), "60"], check=True)
        assert int(taker.stdout.readline()) == nbytes
    return float(done.stdout)


def worlds(said: str) -> list[tuple[int, int, str, bool, str]]:
    return sorted(tuple(json.loads(line)) for line in said.splitlines())


def test_hosts_have_names_and_namespaces_of_their_own(bed: Testbed) -> None:
    assert bed.hosts == ("a", "b")
    assert [bed.run(host, ["hostname"]).stdout for host in bed.hosts] == ["a\n", "b\n"]
    for kind in HOST_OWN:
        own = {bed.run(host, ["readlink", f"/proc/self/ns/{kind}"]).stdout for host in bed.hosts}
        own |= {os.readlink(f"/proc/self/ns/{kind}") + "\n"}
        assert len(own) == 3, kind
    assert bed.login(["hostname"]).stdout.strip() == os.uname().nodename


def test_what_one_host_writes_for_itself_no_other_sees(bed: Testbed) -> None:
    for place in ("/tmp", "/dev/shm", "$XDG_RUNTIME_DIR"):
        write = f'cd "{place}" && hostname > mark && pwd'
        where = {bed.run(host, ["sh", "-c", write], check=True).stdout for host in bed.hosts}
        assert len(where) == 1  # each host uses the same path
        read = ["cat", f"{where.pop().strip()}/mark"]
        assert [bed.run(host, read).stdout for host in bed.hosts] == ["a\n", "b\n"]
        assert bed.login(read).returncode == 1
    processes = bed.run("a", ["ps", "-e", "-o", "args="]).stdout
    assert "slurmd -D -N a" in processes
    assert "slurmd -D -N b" not in processes


def test_all_see_this_machines_files_and_each_others_names(bed: Testbed) -> None:
    for host in bed.hosts:
        assert bed.run(host, ["test", "-f", __file__]).returncode == 0
        for name in (*bed.hosts, "login"):
            found = bed.run(host, ["getent", "hosts", name]).stdout.split()
            assert (found[0], name in found) == (bed.addresses[name], True)
    # Only the login node has a route to the hosts and their names, not the rest of this machine.
    assert bed.login(["getent", "hosts", "b"]).stdout.split() == [bed.addresses["b"], "b"]
    assert bed.addresses["b"] not in Path("/etc/hosts").read_text()


def test_the_links_counter_rises_by_what_was_sent(bed: Testbed) -> None:
    before = {host: bed.sent(host) for host in bed.hosts}
    sent_between(bed, "a", "b", PAYLOAD)
    rose = {host: bed.sent(host) - before[host] for host in bed.hosts}
    assert PAYLOAD < rose["a"] < 1.1 * PAYLOAD  # the payload and the headers of its packets
    assert 0 < rose["b"] < 0.1 * PAYLOAD  # acknowledgements only


def test_mpiexec_makes_one_world_of_both_hosts_with_an_agent_in_place_of_ssh(
    bed: Testbed, mpirun: Mpirun
) -> None:
    before = {host: bed.sent(host) for host in bed.hosts}
    done = mpirun(WORLD)
    assert done.returncode == 0, done.stderr
    said = worlds(done.stdout)
    assert [(rank, size, right) for rank, size, _, right, _ in said] == [
        (rank, 4, True) for rank in range(4)
    ]
    assert [host for _, _, host, _, _ in said] == ["a", "a", "b", "b"]
    assert len({network for *_, network in said}) == 2
    # Each host needs at least the sum of the other host's ranks, and only the link connects the
    # hosts.
    assert all(bed.sent(host) - before[host] > 2**21 for host in bed.hosts)


def test_srun_with_pmix_makes_one_world_of_four(
    bed: Testbed, mpi_environment: dict[str, str]
) -> None:
    command = ["srun", "-N2", "--ntasks-per-node=2", "--mpi=pmix", *WORLD]
    done = bed.login(command, env=mpi_environment, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    said = worlds(done.stdout)
    assert [(rank, size, right) for rank, size, _, right, _ in said] == [
        (rank, 4, True) for rank in range(4)
    ]
    assert sorted(host for _, _, host, _, _ in said) == ["a", "a", "b", "b"]


def test_srun_without_pmix_makes_as_many_worlds_of_one_and_says_nothing(
    bed: Testbed, mpi_environment: dict[str, str]
) -> None:
    """Show what a launcher must refuse: srun exits with 0 and no error, but nothing is summed."""
    command = ["srun", "-N2", "--ntasks-per-node=2", "--mpi=none", *WORLD]
    done = bed.login(command, env=mpi_environment, cwd=ROOT, timeout=100)
    assert (done.returncode, "error" in done.stderr) == (0, False), done.stderr
    assert [(rank, size) for rank, size, *_ in worlds(done.stdout)] == [(0, 1)] * 4


def test_slurm_counts_the_cores_that_were_asked_for(bed: Testbed) -> None:
    told = bed.run("b", ["sinfo", "--noheader", "--Node", "--format=%N %c"])
    assert told.stdout.splitlines() == ["a 3", "b 3"], told.stderr
    refused = bed.login(["srun", "--immediate=1", "-N1", "-c4", "true"])
    assert refused.returncode != 0
    assert "Requested node configuration is not available" in refused.stderr


def test_the_agent_takes_the_words_of_ssh(bed: Testbed) -> None:
    def ssh(*words: str, **options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([bed.agent, *words], capture_output=True, text=True, **options)

    assert ssh("-x", "-o", "BatchMode=yes", "root@b", "hostname;", "pwd").stdout == "b\n/root\n"
    assert ssh(bed.addresses["a"], "cat; exit 7", input="heard").stdout == "heard"
    assert ssh("a", "exit 7").returncode == 7
    unknown = ssh("c", "true")
    assert unknown.returncode == 255
    assert unknown.stderr.startswith("ssh: Could not resolve hostname c:")


def test_nothing_gets_through_a_cable_that_was_pulled(bed: Testbed) -> None:
    call = [sys.executable, "-c", SENDS, "b", "1", "1"]
    bed.link_down("b")
    try:
        refused = subprocess.run([bed.agent, "b", "true"], capture_output=True, text=True)
        assert (refused.returncode, "No route to host" in refused.stderr) == (255, True)
        before = bed.sent("b")
        assert "Error" in bed.run("a", call).stderr
        assert bed.sent("b") == before
    finally:
        bed.link_up()
    assert "Connection refused" in bed.run("a", call).stderr  # b answers, but nothing listens


def test_a_host_that_is_not_there_is_refused_with_those_that_are(bed: Testbed) -> None:
    for ask in (lambda: bed.run("c", ["true"]), lambda: bed.sent("c"), lambda: bed.link_down("c")):
        with pytest.raises(lk.InvalidInput, match="host='c' is not in this testbed; allowed: a, b"):
            ask()


def test_it_shows_itself_in_a_notebook(bed: Testbed) -> None:
    assert repr(bed) == "<testbed of 2 hosts at 1Gb/s, up>"
    html = bed._repr_html_()
    assert "Testbed, up" in html
    assert f"a {bed.addresses['a']}, b {bed.addresses['b']}" in html
    assert "3 CPUs a node" in html


def test_three_hosts_without_slurm_are_joined_at_the_rate_that_was_asked_for(means: None) -> None:
    with lk.testbed(nodes=3, bandwidth="20Mb/s", slurm=False) as bed:
        assert bed.hosts == ("a", "b", "c")
        seconds = sent_between(bed, "a", "c", 2**20)
        # After a pause, a burst of some kB passes above the rate; a busy machine only slows the
        # transfer.
        assert seconds > 0.9 * 8 * 2**20 / 20e6
        assert "slurm" not in bed.run("a", ["ps", "-e", "-o", "args="]).stdout
    with pytest.raises(lk.LabkitError, match="the testbed has ended; start another one"):
        bed.command("a", ["true"])
