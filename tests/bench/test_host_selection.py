"""Test how hosts for measurements are chosen, and allreduces between emulated hosts."""

from __future__ import annotations

import os

import pytest

import labkit as lk
from labkit.bench.host_allreduce import HostSelection, groups, measure, refuse_impossible
from labkit.cluster.start import VARIABLES


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ensure that no variable names hosts, and that this user cannot create virtual hosts."""
    for name in VARIABLES.values():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_ranks_fill_one_host_after_the_other_or_are_dealt_out() -> None:
    assert groups(5, 2, "core") == [[0, 1, 2], [3, 4]]
    assert groups(5, 2, "node") == [[0, 2, 4], [1, 3]]


@pytest.mark.usefixtures("pretended")
def test_without_hosts_ranks_of_this_machine_emulate_them_and_it_is_said() -> None:
    on = HostSelection(workers=4, map_by="node", bandwidth="100Mb/s")
    assert on.network is not None
    assert on.network.hosts == ((0, 2), (1, 3))
    assert 0.9 * 100e6 / 8 < on.network.bandwidth < 100e6 / 8
    assert (
        "on an emulated network of 2 hosts: the environment variables name no hosts, and a "
        "testbed needs" in on.description
    )


def test_hosts_that_are_named_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_LAUNCHER", "slurm")
    monkeypatch.setenv("LABKIT_NODES", "1")
    on = HostSelection()
    assert on.network is None
    assert on.description == "4 ranks on the hosts that environment variables name"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"bandwidth": "fast"}, "bandwidth='fast' is impossible"),
        ({"nodes": 1}, "nodes=1 for workers=4: give at least 2 nodes"),
        ({"nodes": 5}, "nodes=5 for workers=4"),
        ({"map_by": "rack"}, "map_by='rack' is not known; allowed: slot, node"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(lk.InvalidInput, match=told):
        HostSelection(**given)  # type: ignore[arg-type]


def test_sums_are_held_to_those_of_the_ring() -> None:
    for algorithms in (["mpi", "two_level"], ["ring", "shared_memory"]):
        with pytest.raises(lk.InvalidInput, match="include 'ring', which is the baseline"):
            refuse_impossible(algorithms, [4096], 1)
    with pytest.raises(lk.InvalidInput, match="at least 4 bytes, and at least 1 repeat"):
        refuse_impossible(["ring"], [], 1)


@pytest.mark.usefixtures("pretended")
def test_pretended_hosts_are_measured_and_predicted_alike(cluster: lk.Cluster) -> None:
    on = HostSelection(4, 2, "1Gb/s", "slot")
    rows, network = measure(on, cluster, ["mpi", "ring", "two_level"], [4096], 2)
    assert network is on.network
    assert rows[0]["network"] == "1Gb/s between 2 hosts, emulated"
    # The algorithm "mpi" is left out, because no emulated link delays messages of the MPI library.
    assert [row["algorithm"] for row in rows] == ["ring", "two_level"]
    assert all(row["correct"] for row in rows)
    assert [row["predicted_link_bytes"] for row in rows] == [6144, 4096]
    assert rows[0]["ratio"] == rows[0]["predicted_ratio"] == 1
