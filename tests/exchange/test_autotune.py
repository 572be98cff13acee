"""Test that an algorithm is chosen by measurement, or by simulation on an emulated network."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from labkit import Cluster
from labkit.exchange.autotune import Choice, choose
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import simulate


def test_the_fastest_on_the_slowest_rank_is_chosen_on_all_ranks(cluster: Cluster) -> None:
    def chosen(communicator: Any, slow: str, on: int) -> Choice:
        real = communicator.allreduce

        def allreduce(buffer: np.ndarray, algorithm: str) -> None:
            real(buffer, algorithm)
            # This delay on a single rank is far longer than any algorithm takes.
            time.sleep(0.1 if algorithm in slow.split() and communicator.rank == on else 0.0)

        communicator.allreduce = allreduce
        return choose(communicator, "auto", 4000)

    for fast, slow in (("mpi", "ring shared_memory"), ("ring", "shared_memory mpi")):
        found = cluster.call(chosen, slow, 1, ranks=2)
        assert found[0] == found[1]
        assert found[0].algorithm == fast
        assert found[0].why.startswith(f"the fastest when timed with 0.004 MB on 2 ranks: {fast} ")
        assert all(name in found[0].why for name in slow.split())


@pytest.mark.parametrize("nbytes", [64, 40_000_000])
def test_on_an_emulated_network_the_simulator_decides(cluster: Cluster, nbytes: int) -> None:
    network = Network(latency=1e-3, bandwidth=1e8)
    seconds = {name: simulate(name, 4, nbytes, network).seconds for name in ALLREDUCE}

    def chosen(communicator: Any) -> Choice:
        return choose(communicator, "auto", nbytes)

    for found in cluster.call(chosen, network=network):
        assert seconds[found.algorithm] == min(seconds.values())
        assert found.why.startswith("simulated for ")


def test_what_was_asked_for_is_taken_and_payloads_go_by_the_library(cluster: Cluster) -> None:
    def chosen(communicator: Any) -> list[str]:
        asked = choose(communicator, "tree", 4000)
        return [asked.algorithm, choose(communicator, "auto", 4000, dense=False).algorithm]

    assert cluster.call(chosen) == [["tree", "mpi"]] * 4


def test_only_shared_memory_is_summed_where_all_ranks_see_it() -> None:
    names = ["mpi", "ring", "tree", "shared_memory"]
    assert [name for name in names if Choice(name, "").in_place] == ["shared_memory"]
