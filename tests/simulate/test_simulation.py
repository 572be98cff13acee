"""Test the simulator against arithmetic done by hand."""

from __future__ import annotations

import tracemalloc
from math import ceil, floor, log2

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.network import Network, Slowdown
from labkit.schedules import ALLREDUCE, Round, get_collective
from labkit.schedules.round import count_chunks
from labkit.simulate import simulate
from labkit.simulate.events import Events, Lockstep

SIZES = range(2, 18)
A, B, G, N = 0.25, 0.5, 0.125, 48.0  # α in s, β and γ in s per byte, n in bytes
SWITCH = Network(latency=A, bandwidth=1 / B)
FIFO = Network(latency=A, bandwidth=1 / B, sharing="fifo")


def seconds(name: str, size: int, network: Network = SWITCH) -> float:
    return simulate(name, size, N, network, gamma=G).seconds


@pytest.mark.parametrize("p", SIZES)
def test_ring_takes_two_p_minus_1_steps_of_a_chunk(p: int) -> None:
    by_hand = 2 * (p - 1) * (A + N / p * B) + (p - 1) / p * N * G
    assert seconds("ring", p) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("p", SIZES)
def test_master_worker_pays_bytes_on_one_link_and_latency_once_each_way(p: int) -> None:
    by_hand = 2 * (A + (p - 1) * N * B) + (p - 1) * N * G
    assert seconds("master_worker", p) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("p", SIZES)
def test_tree_pays_its_hops_and_the_children_of_its_root(p: int) -> None:
    hops, children = floor(log2(p)), ceil(log2(p))
    up = hops * (A + N * G) + children * N * B
    down = hops * A + children * N * B
    assert seconds("tree", p, FIFO) == pytest.approx(up + down, rel=1e-12)
    if hops == children:  # no rank sends early, so no two messages meet
        assert seconds("tree", p) == pytest.approx(up + down, rel=1e-12)


def test_tree_of_three_by_hand() -> None:
    # Messages 1 -> 0 and 2 -> 0 share 0's link and both arrive at 2nβ + α = 48.25; adding two takes
    # until 60.25. Then 0 -> 2 takes until 84.5; behind it, 0 -> 1 uses 0's link from 84.25 on,
    # until 84.25 + nβ + α.
    assert seconds("tree", 3) == 108.5


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_butterfly_swaps_lg_p_times(p: int) -> None:
    assert seconds("butterfly", p) == pytest.approx(log2(p) * (A + N * B + N * G), rel=1e-12)


def test_butterfly_of_three_by_hand() -> None:
    # The message 1 -> 0 and its addition take until α + nβ + nγ = 30.25. Rank 0 then adds the
    # waiting message 2 -> 0 until 36.25. Its link sends the message to 2 until 54.25, then the
    # result to 1 until 54.25 + nβ + α.
    assert seconds("butterfly", 3, FIFO) == 78.5
    # On a shared link, both messages reach 0 at 2nβ + α = 48.25, and adding takes nγ, until 54.25.
    # Then 0 -> 2 leaves; behind it, the result goes to 1 from 78.25 on, until 78.25 + nβ + α.
    assert seconds("butterfly", 3) == 102.5


@pytest.mark.parametrize("name", list(ALLREDUCE))
def test_what_is_sent_is_what_the_textbook_says(name: str) -> None:
    done = simulate(name, 7, N, SWITCH)
    counted = get_collective(name).counts(7)
    assert done.messages.tolist() == counted.messages.tolist()
    assert done.sent == pytest.approx(counted.bytes(N))
    # Every message crosses the link out of one rank and the link into another rank.
    assert done.occupied.sum() == pytest.approx(2 * B * counted.bytes(N).sum())


@pytest.mark.parametrize("size", [3, 6, 13])
def test_each_message_is_sent_once_at_whatever_pace_ranks_go(size: int) -> None:
    for name in ("rabenseifner", "butterfly", "tree"):
        done = simulate(name, size, N, SWITCH)
        assert done.messages.tolist() == get_collective(name).counts(size).messages.tolist()
        assert simulate(name, size, N, SWITCH, gamma=1e-12).seconds == pytest.approx(done.seconds)


def test_one_rank_is_done_at_once() -> None:
    done = simulate("ring", 1, N, SWITCH, trace=True)
    assert (done.seconds, done.trace is not None and len(done.trace.messages)) == (0.0, 0)


def test_compute_delays_a_rank_and_all_that_wait_for_it() -> None:
    late = simulate("ring", 4, N, SWITCH, compute=[0, 0, 3, 0]).seconds
    assert late == pytest.approx(3 + simulate("ring", 4, N, SWITCH).seconds)


def test_a_straggler_belongs_to_the_network() -> None:
    network = Network(latency=A, bandwidth=1 / B, stragglers={2: Slowdown(compute=4)})
    straggling = simulate("ring", 4, N, network, compute=1.0).seconds
    assert straggling == pytest.approx(4 + simulate("ring", 4, N, SWITCH).seconds)


def test_hierarchical_overtakes_a_ring_that_leaves_its_host_at_every_hop() -> None:
    hosts = tuple(range(0, 16, 2)), tuple(range(1, 16, 2))
    inside = {"host_latency": 1e-6, "host_bandwidth": 1e10}
    network = Network(latency=1e-3, bandwidth=1e8, hosts=hosts, **inside)
    times = {name: simulate(name, 16, 1e6, network).seconds for name in ("ring", "hierarchical")}
    assert times["hierarchical"] < times["ring"] / 10


def test_spanning_trees_overtake_ring_on_unequal_links() -> None:
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    links = {(a, b): 1.0 if (a + b) == 1 else 10.0 for a, b in pairs}
    network = Network(latency=1e-3, bandwidth=1, links=links)
    trees = simulate("spanning_trees", 4, 100, network).seconds
    assert trees < simulate("ring", 4, 100, network).seconds / 2


def test_the_trace_has_every_message_and_its_times() -> None:
    done = simulate("master_worker", 3, N, SWITCH, trace=True)
    trace = done.trace
    assert trace is not None
    assert trace.round.tolist() == [0, 0, 1, 1]
    assert trace.messages.destination.tolist() == [0, 0, 1, 2]
    assert trace.start.tolist() == [0, 0, 48.25, 48.25]
    assert trace.delivery.tolist() == [48.25, 48.25, 96.5, 96.5]
    rows = trace.link == done.links.index("rank 0 in")
    assert trace.link_start[rows].tolist() == [0, 0]
    assert trace.link_stop[rows].tolist() == [48, 48]
    assert trace.link_share[rows].tolist() == [0.5, 0.5]


def test_on_links_that_serve_in_turn_the_trace_says_whose_turn_it_was() -> None:
    done = simulate("master_worker", 3, N, FIFO, trace=True)
    trace = done.trace
    assert trace is not None
    assert trace.start.tolist() == [0, 0, 48.25, 72.25]
    assert trace.delivery.tolist() == [24.25, 48.25, 72.5, 96.5]
    rows = trace.link == done.links.index("rank 0 in")
    assert trace.link_start[rows].tolist() == [0, 24]
    assert trace.link_stop[rows].tolist() == [24, 48]
    assert trace.link_share[rows].tolist() == [1, 1]


def test_butterfly_by_hand_on_hosts_whose_uplink_never_blocks() -> None:
    # Two hosts of four ranks: the last of three exchanges crosses an uplink with four ranks'
    # bandwidth.
    hosts = Network(latency=A, bandwidth=4 / B, hosts=4, host_bandwidth=1 / B)
    assert simulate("butterfly", 8, N, hosts).seconds == pytest.approx(3 * (A + N * B))


HOSTS = Network(latency=A, bandwidth=1 / B, hosts=4, host_latency=A / 9, host_bandwidth=7 / B)


@pytest.mark.parametrize("network", [SWITCH, HOSTS], ids=["switch", "hosts"])
@pytest.mark.parametrize("name", list(ALLREDUCE))
def test_ranks_at_their_own_pace_take_as_long_as_rounds_that_do_not_meet(
    name: str, network: Network
) -> None:
    """Test that event simulation gives the same times as rounds, where each round is one step."""
    compared = 0
    for size in (6, 8, 12, 13):
        schedule, given = network.schedule(name), (network, size, G, 0.0, False)
        chunk = N / count_chunks(schedule(size))
        rounds, events = Lockstep(*given), Events(*given)
        events.run(schedule(size), chunk)
        if rounds.run(schedule(size), chunk):
            compared += 1
            assert rounds.clock == pytest.approx(events.clock, rel=1e-9)
            assert rounds.tally.carried == pytest.approx(events.tally.carried, rel=1e-9)
            assert rounds.tally.messages.tolist() == events.tally.messages.tolist()
    assert compared or (network is HOSTS and name not in ("ring", "hierarchical", "two_level"))


@pytest.mark.parametrize("trace", [False, True])
def test_messages_that_meet_need_no_events_where_no_trace_is_kept(trace: bool) -> None:
    rounds = Lockstep(SWITCH, 8, G, 0.0, trace)
    assert rounds.run(get_collective("master_worker")(8), N) is not trace


def test_a_server_of_hundreds_of_workers_that_come_one_by_one() -> None:
    # All 300 messages arrive before the link has sent the first, so the link is busy from 0 to 300
    # nβ.
    push = Round(range(1, 301), [0] * 300, reduce=True)
    late = np.concatenate([[0.0], np.linspace(0, 20, 300)])
    done = simulate(lambda _: [push], 301, N, SWITCH, compute=late)
    assert done.finish[0] == pytest.approx(300 * N * B + A)


def test_utilisation_shows_the_burst() -> None:
    done = simulate("master_worker", 5, N, SWITCH, trace=True)
    edges, shares = done.utilisation(bins=50)
    assert edges[-1] == done.seconds
    assert shares.shape == (len(done.links), 50)
    assert (shares >= 0).all()
    assert (shares <= 1 + 1e-12).all()
    assert (shares @ np.diff(edges)) == pytest.approx(done.occupied)
    master_in = shares[done.links.index("rank 0 in")]
    assert master_in[:24] == pytest.approx(1)
    assert master_in[26:] == pytest.approx(0)


def test_utilisation_needs_a_trace() -> None:
    with pytest.raises(InvalidInput, match="trace=True"):
        simulate("ring", 2, N, SWITCH).utilisation()


def test_a_schedule_of_ones_own_is_simulated_like_the_others() -> None:
    def to_the_right(size: int) -> list[Round]:
        return [Round(range(size - 1), range(1, size), reduce=True)]

    assert simulate(to_the_right, 3, N, SWITCH).finish.tolist() == [0, 24.25, 24.25]


def test_without_trace_memory_does_not_grow_with_rounds() -> None:
    tracemalloc.start()
    done = simulate("ring", 512, N, SWITCH)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert done.messages.sum() == 2 * 512 * 511
    # All 523,264 rows of five 8-byte columns at once would take 20 MB.
    assert peak < 2e6


@pytest.mark.parametrize("wrong", [{"size": 0}, {"nbytes": -1.0}, {"gamma": -1.0}])
def test_what_cannot_be_simulated_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="no negative numbers"):
        simulate(**{"schedule": "ring", "size": 2, "nbytes": N, "network": SWITCH} | wrong)  # type: ignore[arg-type]


def test_unknown_names_are_answered_with_the_names() -> None:
    with pytest.raises(InvalidInput, match=r"allowed: .*100Mb"):
        simulate("ring", 2, N, "token-ring")
    with pytest.raises(InvalidInput, match=r"allowed: .*butterfly"):
        simulate("wheel", 2, N, "1GbE")
