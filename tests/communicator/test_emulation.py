"""Emulated networks on the wall clock: nothing arrives before it would, whatever moves it."""

import time

import numpy as np
import pytest

from labkit.cluster import RankError
from labkit.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.simulate import simulate
from labkit.strategies import AllReduce

# Slow enough that what this machine adds does not matter: 100 kB take 50 ms.
SLOW = Network(latency=0.01, bandwidth=2e6)
NBYTES = 100_000


def timed(communicator, algorithm, nbytes):
    buffer = np.ones(nbytes // 4, np.float32)
    communicator.allreduce(buffer, algorithm)  # makes the plan
    communicator.meet()
    start = time.perf_counter()
    communicator.allreduce(buffer, algorithm)
    return time.perf_counter() - start, communicator.traffic.wait_seconds


@pytest.mark.parametrize("algorithm", ["ring", "master_worker", "tree", "rabenseifner"])
def test_an_allreduce_takes_what_the_simulator_says(cluster, algorithm):
    seconds = [s for s, _ in cluster.call(timed, algorithm, NBYTES, network=SLOW)]
    predicted = simulate(algorithm, 4, NBYTES, SLOW)
    assert max(seconds) >= predicted.seconds * 0.999
    assert max(seconds) <= predicted.seconds * 1.5  # a loaded machine adds, but not half


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_message_on_its_way_is_transfer_and_a_late_rank_is_waited_for(cluster, delay):
    def meet_late(communicator):
        buffer = np.ones(NBYTES // 4, np.float32)
        communicator.allreduce(buffer, "ring")  # makes the plan
        communicator.meet()
        if communicator.rank == 1:
            time.sleep(delay)
        before, start = communicator.traffic.copy(), time.perf_counter()
        communicator.allreduce(buffer, "ring")
        seconds, spent = time.perf_counter() - start, communicator.traffic.since(before)
        return seconds, spent.wait_seconds, spent.transfer_seconds

    found = cluster.call(meet_late, ranks=2, network=SLOW)
    assert all(abs(wait + moved - seconds) < 0.02 for seconds, wait, moved in found)
    if delay:
        assert found[0][1] >= 0.9 * delay
    else:
        assert all(moved >= 0.8 * seconds for seconds, _, moved in found)


def test_point_to_point_messages_and_windows_take_their_time(cluster):
    def send_and_put(communicator):
        data = np.ones(NBYTES, np.uint8)
        communicator.meet()
        start = time.perf_counter()
        if communicator.rank == 0:
            communicator.send(data, 1)
        elif communicator.rank == 1:
            communicator.recv(data, 0)
        received = time.perf_counter() - start
        window = communicator.window(NBYTES)
        communicator.meet()
        start = time.perf_counter()
        if communicator.rank == 0:
            window.put(data, 1)
        put = time.perf_counter() - start
        communicator.meet()
        window.close()
        return received, put

    (_, put), (received, _) = cluster.call(send_and_put, ranks=2, network=SLOW)
    expected = SLOW.latency + NBYTES / SLOW.bandwidth
    assert received >= 0.99 * expected
    assert put >= 0.99 * expected


def test_a_shared_uplink_makes_hosts_wait_for_each_other(cluster):
    """Two pairs across hosts at once share the uplink: twice the time of one pair."""

    def across(communicator, pairs):
        data = np.ones(NBYTES, np.uint8)
        communicator.meet()
        start = time.perf_counter()
        if communicator.rank < pairs:
            communicator.send(data, communicator.rank + 2)
        elif 2 <= communicator.rank < 2 + pairs:
            communicator.recv(data, communicator.rank - 2)
        return time.perf_counter() - start

    hosts = Network(latency=0, bandwidth=2e6, hosts=2, host_bandwidth=1e9)
    one = cluster.call(across, 1, network=hosts)
    both = cluster.call(across, 2, network=hosts)
    assert max(one[2:3]) == pytest.approx(NBYTES / 2e6, rel=0.5)
    assert max(both[2:]) >= 2 * NBYTES / 2e6 * 0.99


def test_hierarchical_knows_the_emulated_hosts(cluster):
    def counted(communicator):
        communicator.allreduce(np.ones(64), "hierarchical")
        return communicator.traffic.messages

    flat = Network(latency=0, bandwidth=1e9)
    hosts = Network(latency=0, bandwidth=1e9, hosts=((0, 1, 2), (3,)))
    assert cluster.call(counted, network=hosts) == [4, 1, 1, 2]
    assert cluster.call(counted, network=flat) == [3, 1, 3, 1]


@pytest.mark.parametrize("algorithm", ["mpi", "shared_memory"])
def test_what_cannot_be_emulated_is_refused_before_any_rank_starts(algorithm):
    with pytest.raises(InvalidInput, match=r"choose one of all_to_all.* or network=None"):
        Experiment(network="1GbE", workers=2, strategy=AllReduce(algorithm=algorithm))


@pytest.mark.parametrize("algorithm", ["mpi", "shared_memory"])
def test_what_cannot_be_emulated_is_refused_on_ranks_too(cluster, algorithm):
    with pytest.raises(RankError, match="cannot run on the emulated network '1GbE'"):
        cluster.call(timed, algorithm, 100, network="1GbE")


def test_a_slow_rank_computes_longer_by_its_factor(cluster):
    def compute(communicator):
        start = time.perf_counter()
        communicator.act_slow(0.1)
        return time.perf_counter() - start

    seconds = cluster.call(compute, network=Network(latency=0, bandwidth=1e9, slow={1: 3.0}))
    assert seconds[1] >= 0.2
    assert max(seconds[0], *seconds[2:]) < 0.1
