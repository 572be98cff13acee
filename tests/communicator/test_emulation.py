"""Test emulated networks on the wall clock: no message arrives earlier than on a real network."""

import itertools
import time

import numpy as np
import pytest

from labkit.cluster import RankError
from labkit.common.errors import InvalidInput
from labkit.experiment import Experiment
from labkit.network import Network
from labkit.simulate import simulate
from labkit.strategies import AllReduce

# The networks are so slow that delays of a busy machine do not matter: 100 kB take 50 ms or 200 ms.
SLOW = Network(latency=0.01, bandwidth=2e6)
SLOWER = Network(latency=0.04, bandwidth=5e5)
NBYTES = 100_000


def timed(communicator, algorithm, nbytes):
    buffer = np.ones(nbytes // 4, np.float32)
    communicator.allreduce(buffer, algorithm)  # the first call plans the allreduce
    communicator.barrier()
    start = time.monotonic()
    communicator.allreduce(buffer, algorithm)
    return start, time.monotonic()


def span(moments):
    """Return the seconds from the first rank's start to the last one's end, on the host's clock."""
    return max(stop for _, stop in moments) - min(start for start, _ in moments)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "master_worker", "tree", "rabenseifner"])
def test_an_allreduce_takes_what_the_simulator_says(cluster, algorithm):
    tries = [span(cluster.call(timed, algorithm, NBYTES, network=SLOWER)) for _ in range(3)]
    predicted = simulate(algorithm, 4, NBYTES, SLOWER)
    assert min(tries) >= predicted.seconds * 0.999
    assert min(tries) <= predicted.seconds * 1.5  # other load adds time, but seldom in all tries


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_a_message_on_its_way_is_transfer_and_a_late_rank_is_waited_for(cluster, delay):
    def meet_late(communicator):
        buffer = np.ones(NBYTES // 4, np.float32)
        communicator.allreduce(buffer, "ring")  # the first call plans the allreduce
        communicator.barrier()
        if communicator.rank == 1:
            time.sleep(delay)
        before, start = communicator.traffic.copy(), time.perf_counter()
        communicator.allreduce(buffer, "ring")
        seconds, spent = time.perf_counter() - start, communicator.traffic.since(before)
        return seconds, spent.wait_seconds, spent.transfer_seconds

    found = cluster.call(meet_late, ranks=2, network=SLOWER)
    assert all(wait + moved <= seconds for seconds, wait, moved in found)
    assert all(wait + moved >= 0.5 * seconds for seconds, wait, moved in found)
    if delay:
        assert found[0][1] >= 0.5 * delay
    else:
        assert all(moved >= 0.5 * NBYTES / SLOWER.bandwidth for _, _, moved in found)


def test_point_to_point_messages_and_windows_take_their_time(cluster):
    def send_and_put(communicator):
        data = np.ones(NBYTES, np.uint8)
        communicator.barrier()
        sent = time.monotonic()
        if communicator.rank == 0:
            communicator.send(data, 1)
        elif communicator.rank == 1:
            communicator.recv(data, 0)
        received = time.monotonic()
        window = communicator.window(NBYTES)
        communicator.barrier()
        start = time.monotonic()
        if communicator.rank == 0:
            window.put(data, 1)
        put = time.monotonic() - start
        communicator.barrier()
        window.close()
        return sent, received, put

    (sent, _, put), (_, received, _) = cluster.call(send_and_put, ranks=2, network=SLOW)
    expected = SLOW.latency + NBYTES / SLOW.bandwidth
    assert received - sent >= 0.99 * expected
    assert put >= 0.99 * expected


def test_a_shared_uplink_makes_hosts_wait_for_each_other(cluster):
    """Two simultaneous transfers between hosts share the uplink, and take twice as long as one."""

    def across(communicator, pairs):
        data = np.ones(NBYTES, np.uint8)
        communicator.barrier()
        start = time.monotonic()
        if communicator.rank < pairs:
            communicator.send(data, communicator.rank + 2)
        elif 2 <= communicator.rank < 2 + pairs:
            communicator.recv(data, communicator.rank - 2)
        return start, time.monotonic()

    hosts = Network(latency=0, bandwidth=5e5, hosts=2, host_bandwidth=1e9)
    one = min(span(cluster.call(across, 1, network=hosts)[::2]) for _ in range(3))
    both = span(cluster.call(across, 2, network=hosts))
    assert NBYTES / 5e5 <= one < 1.9 * NBYTES / 5e5
    assert both >= 2 * NBYTES / 5e5


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
    with pytest.raises(
        InvalidInput, match=r"give one of the algorithms all_to_all.* or network=None"
    ):
        Experiment(network="1GbE", workers=2, strategy=AllReduce(algorithm=algorithm))


@pytest.mark.parametrize("algorithm", ["mpi", "shared_memory"])
def test_what_cannot_be_emulated_is_refused_on_ranks_too(cluster, algorithm):
    with pytest.raises(RankError, match="cannot run on the emulated network '1GbE'"):
        cluster.call(timed, algorithm, 100, network="1GbE")


def test_a_slow_rank_computes_longer_by_its_factor(cluster):
    def compute(communicator):
        start = time.perf_counter()
        communicator.apply_slowdown(0.1)
        return time.perf_counter() - start

    seconds = cluster.call(compute, network=Network(latency=0, bandwidth=1e9, stragglers={1: 3.0}))
    assert seconds[1] >= 0.2
    assert min(seconds[0], *seconds[2:]) < 0.1  # no sleep here; the machine may be busy


def test_parts_of_the_ranks_wait_for_the_same_links(cluster):
    """Each of two groups has a rank on each of two hosts, so both groups share the uplinks."""
    network = Network(latency=0, bandwidth=2e6, host_bandwidth=1e12, hosts=2)

    def send_between_hosts(communicator):
        part = communicator.split(communicator.rank % 2)
        assert part.network.hosts == ((0,), (1,))
        data = np.ones(NBYTES, np.uint8)
        communicator.barrier()
        start = time.monotonic()
        if part.rank == 0:
            part.send(data, 1)
        else:
            part.recv(data, 0)
        stop = time.monotonic()
        part.close()
        return start, stop

    seconds = span(cluster.call(send_between_hosts, network=network))
    # The uplink carries one message after the other.
    assert seconds >= 2 * NBYTES / network.bandwidth


@pytest.mark.parametrize("paced", [True, False])
@pytest.mark.parametrize("what", ["vectors", "payloads"])
@pytest.mark.parametrize("sharing", ["fair", "fifo"])
def test_a_paced_rank_holds_a_message_back_until_its_links_are_free(cluster, what, paced, sharing):
    def departures(communicator, what, paced):
        """Return for each message when it was sent, and until when the rank had to wait first."""
        communicator.pace(paced)
        given, emulation = [], communicator._emulation
        depart, holds = emulation.depart, emulation.send_moments

        def watch(destination, nbytes, turn):
            given.append([time.monotonic(), -1.0])
            return depart(destination, nbytes, turn)

        def watch_holds(ticket):
            for moment in holds(ticket):
                given[-1][1] = moment
                yield moment

        emulation.depart, emulation.send_moments = watch, watch_holds
        if what == "vectors":
            communicator.allreduce(np.ones(NBYTES // 4, np.float32), "all_to_all")
        else:
            communicator.gather_bytes(np.ones(NBYTES, np.uint8), "all_to_all")
        return given

    network = SLOW.model_copy(update={"sharing": sharing})
    for given in cluster.call(departures, what, paced, network=network):
        assert len(given) >= 3
        if paced:
            # Each message leaves after the previous one. A rank that is late anyway does not wait.
            assert all(later >= held for (_, held), (later, _) in itertools.pairwise(given))
            starts = [start for start, _ in given]
            busy = NBYTES / SLOW.bandwidth
            assert all(
                third >= first + busy for first, third in zip(starts, starts[2:], strict=False)
            )
        else:
            assert all(held < 0 for _, held in given)


def sends_and_receives(communicator, messages, sources):
    """Send and receive messages on a manual clock from 0 s; return the times of receipt."""

    class ManualClock:
        moment = 0.0

        def now(self):
            return self.moment

        def sleep(self, seconds):
            self.moment += seconds

        def sleep_until(self, moment, exact=True):
            self.moment = max(self.moment, moment)

    from labkit.communicator import world

    clock = ManualClock()
    own = world(list(range(communicator.size)), 1e9, communicator.network, clock)
    posted = []
    for destination, nbytes, start in messages[own.rank]:
        clock.sleep_until(start)
        posted += own.post(np.ones(nbytes, np.uint8), destination)
    own.barrier()
    clock.moment = 0.0
    found = []
    for source, nbytes in sources[own.rank]:
        own.recv(np.zeros(nbytes, np.uint8), source)
        found.append(clock.now())
    own.finish(posted)
    own.barrier()
    return found


def test_messages_share_links_by_the_clock_that_ranks_are_given(cluster):
    """Ranks 0 and 1 share their host's uplink; the link of rank 3 has a quarter of its bandwidth.

    Rank 0 sends 12 bytes to rank 2, and rank 1 sends 3 bytes to rank 3. Of the uplink's 4 bytes/s,
    rank 3 gets 1 byte/s, and rank 2 gets 3 bytes/s. The 3 bytes thus take 3 s. After 3 s, rank 0
    has sent 9 bytes; its last 3 bytes then have 4 bytes/s and arrive at 3.75 s.
    """
    inside = {"host_bandwidth": 1e9, "host_latency": 0.0}
    network = Network(latency=0, bandwidth=4, hosts=2, stragglers={3: 1e9}, **inside)
    messages = [[(2, 12, 0.0)], [(3, 3, 0.0)], [], []]
    sources = [[], [], [(0, 12)], [(1, 3)]]
    found = cluster.call(sends_and_receives, messages, sources, network=network)
    assert found == [[], [], [pytest.approx(3.75)], [pytest.approx(3.0)]]
    # With "fifo", one message leaves after the other, in order of departure. If they shared the
    # uplink, rank 0's 12 bytes would arrive at 3.75 s again, although rank 1 starts at 0.5 s.
    fifo = network.model_copy(update={"sharing": "fifo"})
    messages[1] = [(3, 3, 0.5)]
    found = cluster.call(sends_and_receives, messages, sources, network=fifo)
    assert found[2] != [pytest.approx(3.75)]


def test_a_small_message_does_not_wait_for_a_large_one(cluster):
    """At 100 bytes/s, rank 2 gets 11 bytes of rank 1 at 0.22 s, 100 bytes of rank 0 at 1.11 s."""
    network = Network(latency=0, bandwidth=100)
    messages, sources = [[(2, 100, 0.0)], [(2, 11, 0.0)], [], []], [[], [], [(1, 11), (0, 100)], []]
    found = cluster.call(sends_and_receives, messages, sources, network=network)
    assert found[2] == pytest.approx([0.22, 1.11])
