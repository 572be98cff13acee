"""Test switches that add: every rank ends with the sum after two hops per level."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.communicator import validate_algorithm
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, get_collective, in_network, switch_above
from labkit.schedules.interpreter import final_buffers, follow, verify_schedule
from labkit.simulate import closed_form, simulate

A, B, N = 0.25, 0.5, 48.0  # α s, β s a byte, n bytes
SWITCH = Network(latency=A, bandwidth=1 / B)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_ends_with_the_sum_and_sends_what_the_textbook_says(size: int) -> None:
    verify_schedule(get_collective("in_network"), size, in_network.counts(size))
    assert follow(in_network, size).complete


def test_two_ranks_as_drawn() -> None:
    drawn = [each.rows() for each in in_network(2)]
    assert drawn == [
        [(0, 2, 0, 1, True), (1, 2, 0, 1, True)],
        [(2, 0, 0, 1, False), (2, 1, 0, 1, False)],
    ]


def test_switches_are_numbered_after_the_ranks() -> None:
    assert switch_above(3).tolist() == [3, 3, 3, -1]
    assert switch_above(4, hosts=[[0, 3], [1, 2]]).tolist() == [4, 5, 5, 4, 6, 6, -1]
    assert follow(partial(in_network, hosts=2), 4).labels == ["0", "1", "2", "3", "S0", "S1", "S2"]


@pytest.mark.parametrize("hosts", [None, 2, 3])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_sum_is_there_on_hosts_and_in_chunks(hosts: int | None, chunks: int) -> None:
    nodes = len(switch_above(7, hosts))
    start = np.zeros((nodes, 6), np.int64)
    start[:7] = np.random.default_rng(0).integers(0, 99, (7, 6))
    end = final_buffers(in_network(7, hosts, chunks), start)
    assert (end[:7] == start.sum(axis=0)).all()


@pytest.mark.parametrize("sharing", ["fair", "fifo"])
@pytest.mark.parametrize("size", [2, 5, 1000])
def test_a_level_takes_two_hops_however_many_ranks(size: int, sharing: str) -> None:
    network = Network(latency=A, bandwidth=1 / B, sharing=sharing)
    done = simulate("in_network", size, N, network, gamma=1.0)
    assert done.seconds == pytest.approx(2 * (A + N * B), rel=1e-9)
    assert done.seconds == pytest.approx(closed_form("in_network", size, N, network), rel=1e-9)
    assert len(done.finish) == len(done.sent) == size
    assert done.sent.tolist() == [N] * size


def test_hosts_are_a_level_of_their_own() -> None:
    network = Network(latency=A, bandwidth=1 / B, hosts=4, host_latency=A / 8, host_bandwidth=9 / B)
    inside, between = A / 8 + N * B / 9, A + N * B
    done = simulate("in_network", 10, N, network, trace=True)
    assert done.seconds == pytest.approx(2 * inside + 2 * between, rel=1e-9)
    assert done.trace is not None
    assert len(done.trace.messages) == 2 * (10 + 3)
    assert done.occupied[done.links.index("switch 0 up")] == pytest.approx(N * B)


def test_chunks_go_up_while_others_come_down() -> None:
    done = simulate(partial(in_network, chunks=8), 6, N, SWITCH)
    bytes_alone = (8 + 1) * N * B / 8
    assert done.seconds == pytest.approx(bytes_alone + 8 * A, rel=1e-9)  # α twice at both ends
    assert done.seconds < simulate("ring", 6, N, SWITCH).seconds


def test_the_slowest_rank_is_waited_for() -> None:
    late = simulate("in_network", 4, N, SWITCH, compute=[0, 0, 3, 0])
    assert late.seconds == pytest.approx(3 + 2 * (A + N * B))


def test_ranks_refuse_by_name_what_only_a_switch_can_do() -> None:
    assert not set(IN_NETWORK) & set(ALLREDUCE)
    with pytest.raises(
        InvalidInput, match="sums inside network switches and runs only in the simulator"
    ):
        validate_algorithm("in_network")


def test_a_graph_of_ranks_has_no_switches() -> None:
    network = Network(latency=0, bandwidth=1, links={(0, 1): 1.0, (1, 0): 1.0})
    with pytest.raises(InvalidInput, match="needs a tree of switches"):
        simulate("in_network", 2, N, network)
