"""Test how arguments and the environment determine where ranks start, and which are refused."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest

from labkit.cluster import Cluster, launch
from labkit.cluster.start import RankInfo, Start
from labkit.common.errors import InvalidInput, LabkitError
from labkit.hosts.host_list import Host


@pytest.fixture(autouse=True)
def no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LAUNCHER", "HOSTS", "NODES", "AGENT", "SLURM"):
        monkeypatch.delenv(f"LABKIT_{name}", raising=False)
    monkeypatch.setenv("LABKIT_TESTBED", "")  # this machine acts as its own login node
    for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "launcher", "workers", "nodes"),
    [
        ({}, "local", 2, 1),
        ({"workers": 5}, "local", 5, 1),
        ({"hosts": ["a:2", "b"]}, "hosts", 3, 1),
        ({"hosts": "a:2,b:2", "workers": 3}, "hosts", 3, 1),
        ({"nodes": 3}, "slurm", 3, 3),
        ({"nodes": 2, "workers": 6}, "slurm", 6, 2),
        ({"launcher": "slurm"}, "slurm", 2, 1),
    ],
)
def test_what_is_not_said_follows_from_what_is(
    given: dict[str, Any], launcher: str, workers: int, nodes: int
) -> None:
    found = Start.from_options(**{"workers": None} | given)
    assert (found.launcher, found.workers, found.nodes) == (launcher, workers, nodes)
    assert Start.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({"workers": 3, "fault_tolerant": True, "spares": 2}, 5),
        ({"hosts": ["localhost:4", "elsewhere:8"]}, 4),
        ({"hosts": ["127.0.0.1:4"], "workers": 2}, 2),
        ({"hosts": ["elsewhere:8"]}, 0),
        ({"nodes": 2, "workers": 64}, 0),
    ],
)
def test_ranks_of_this_machine_are_counted(given: dict[str, Any], here: int) -> None:
    assert Start.from_options(**{"workers": None} | given).ranks_here == here


@pytest.mark.parametrize("hosts", [["localhost:2"], ["127.0.0.1:1", socket.gethostname()]])
def test_hosts_that_all_are_this_machine_are_refused_before_anything_starts(
    hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("the keeper starts")

    monkeypatch.setattr(launch, "launch", start)
    with pytest.raises(InvalidInput, match=r"hosts= names only this machine.*trusted_network=True"):
        Cluster(1, hosts=hosts)
    Start.from_options(1, hosts=hosts, trusted_network=True).check_hosts()
    Start.from_options(1, hosts=[*hosts, "elsewhere:1"]).check_hosts()


def test_a_notebook_that_names_no_launcher_takes_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LABKIT_LAUNCHER", "slurm")
    monkeypatch.setenv("LABKIT_NODES", "4")
    monkeypatch.setenv("LABKIT_SLURM", "--partition=short")
    assert Start.from_options(8).nodes == 4
    assert Start.from_options(2).nodes == 2  # a notebook's own, smaller cluster
    assert Start.from_options(8).partition == "short"
    assert Start.from_options(1, launcher="local") == Start(1)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"workers": 0}, "workers=0 is impossible"),
        ({"nodes": 0}, "nodes=0 is impossible"),
        ({"launcher": "pbs"}, "launcher='pbs' is not known; allowed: local, hosts, slurm"),
        ({"hosts": ["a:2"], "workers": 3}, "workers=3 are too many for hosts with 2 slots"),
        ({"hosts": ["a:2"], "launcher": "slurm"}, "hosts= has no effect with launcher="),
        ({"nodes": 3, "workers": 2}, "nodes=3 for workers=2"),
        ({"map_by": "socket"}, "map_by='socket' is not known .*; allowed: slot, node"),
        (
            {"launch_command": "mpirun"},
            "launch_command='mpirun' is not known .*; allowed: mpiexec, srun",
        ),
        ({"launcher": "hosts"}, "names no host|wants hosts="),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        Start.from_options(**{"workers": None} | given)


def test_commands_are_those_of_the_launcher() -> None:
    hosts = Start.from_options(4, hosts=["a:2", "b:2"], map_by="node").command("job", ["KEY"])
    assert hosts[-2:] == ["--host", "a:2,b:2"]
    assert ("--map-by", "node") in set(pairwise(hosts))
    assert ("-x", "KEY") in set(pairwise(hosts))
    queued = Start.from_options(5, nodes=2, options="--time=10 --qos='a b'").command("job", [])
    assert queued[0] == "salloc"
    assert {"--nodes=2", "--ntasks=5", "--ntasks-per-node=3", "--job-name=job"} <= set(queued)
    assert queued.index("--qos=a b") < next(n for n, w in enumerate(queued) if "mpiexec" in w)
    step = Start.from_options(4, nodes=2, launch_command="srun").command("job", [])
    assert step[:2] == ["srun", "--mpi=pmix"]


def test_hosts_are_reached_by_an_agent_in_the_words_of_either_open_mpi() -> None:
    found = Start.from_options(4, hosts=["a:2", "b:2"], agent="via --fast").environment("job")
    assert found["PRTE_MCA_plm_ssh_agent"] == found["OMPI_MCA_plm_rsh_agent"] == "via --fast"
    assert (found["PRTE_MCA_plm"], found["OMPI_MCA_plm"]) == ("ssh", "rsh")


def test_in_a_job_its_nodes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    inside = Start.from_options(4, launcher="slurm")
    assert (inside.nodes, inside.queues) == (2, False)
    assert "salloc" not in inside.command("job", [])
    assert Start.from_options(4).is_local  # a notebook inside a job, without a named launcher


def met(*places: tuple[int, str]) -> list[RankInfo]:
    return [RankInfo(rank, size, 1, host) for rank, (size, host) in enumerate(places)]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (Start(2), r"form 2 worlds of 1.*labkit doctor"),
        (
            Start(2, launcher="slurm", nodes=2, launch_command="srun"),
            r"2 worlds of 1.*srun --mpi=list",
        ),
    ],
)
def test_several_worlds_are_an_error(how: Start, told: str) -> None:
    with pytest.raises(LabkitError, match=told):
        how.check_world(met((1, "a"), (1, "b")))


def test_other_hosts_than_those_that_were_asked_for_are_an_error() -> None:
    hosts = (Host("a", 2), Host("b", 2))
    filled = Start(2, launcher="hosts", hosts=hosts)
    filled.check_world(met((2, "a"), (2, "a")))
    with pytest.raises(
        LabkitError, match="on 2 hosts \\(a, b\\), but the number of requested hosts is 1"
    ):
        filled.check_world(met((2, "a"), (2, "b")))
    dealt = Start(2, launcher="hosts", hosts=hosts, map_by="node")
    dealt.check_world(met((2, "a"), (2, "b")))
    with pytest.raises(LabkitError, match="on 1 host "):
        dealt.check_world(met((2, "a"), (2, "a")))


@pytest.mark.parametrize(("up", "wanted"), [(True, False), (True, True), (False, True)])
def test_only_who_trusts_the_network_uses_engines_that_do(
    up: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"workers": 2, "threads": 1, "how": Start(2, trusted_network=up).to_json()}
    monkeypatch.setattr(Cluster, "state", lambda self: told)
    cluster = Cluster.__new__(Cluster)
    cluster.how, cluster.name = Start(2, trusted_network=wanted), "x"
    cluster.workers, cluster.threads = 2, 1
    expected = (
        nullcontext() if wanted else pytest.raises(InvalidInput, match="is running with trusted")
    )
    with expected:
        cluster._check_shape()
