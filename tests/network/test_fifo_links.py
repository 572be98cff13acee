"""Test FIFO links: order, hosts, routes, and the split between two processes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.network import FifoLinks, Network


def send(links: FifoLinks, *rows: tuple[int, int, float, float]) -> list[float]:
    """Return delivery times of messages given as (source, destination, bytes, ready)."""
    source, destination, nbytes, ready = (np.array(column) for column in zip(*rows, strict=True))
    return list(links.send(source, destination, nbytes * 1.0, ready * 1.0).delivery)


def unit(**fields: Any) -> Network:
    """Return a FIFO network of 1 byte/s with 10 s of latency."""
    return Network(**{"latency": 10, "bandwidth": 1, "sharing": "fifo"} | fields)


def test_a_message_takes_its_bytes_over_bandwidth_and_latency() -> None:
    assert send(FifoLinks(unit(), 2), (0, 1, 5, 3)) == [3 + 5 + 10]


def test_a_masters_link_serves_one_message_after_the_other() -> None:
    assert send(FifoLinks(unit(), 4), (1, 0, 5, 0), (2, 0, 5, 0), (3, 0, 5, 0)) == [15, 20, 25]


def test_both_directions_of_a_link_are_free_at_once() -> None:
    assert send(FifoLinks(unit(), 2), (0, 1, 5, 0), (1, 0, 5, 0)) == [15, 15]


def test_a_link_serves_in_order_of_readiness_then_of_rows() -> None:
    rows = (1, 0, 5, 2), (2, 0, 5, 0), (3, 0, 5, 2)
    assert send(FifoLinks(unit(), 4), *rows) == [20, 15, 25]


def test_cut_through_does_not_send_twice() -> None:
    # Both links on the route carry the message at the same time, for 5 s instead of 10.
    links = FifoLinks(unit(), 2)
    send(links, (0, 1, 5, 0))
    assert links.busy.tolist() == [5, 0, 0, 5]


def test_a_busy_receiver_does_not_hold_up_the_senders_next_message() -> None:
    rows = (1, 0, 5, 0), (2, 0, 5, 0), (2, 3, 5, 0)
    assert send(FifoLinks(unit(), 4), *rows) == [15, 20, 20]


def test_links_stay_busy_from_one_round_to_the_next() -> None:
    links = FifoLinks(unit(), 3)
    send(links, (0, 1, 5, 0))
    assert send(links, (0, 2, 5, 1)) == [20]


def test_an_empty_message_takes_the_latency() -> None:
    assert send(FifoLinks(unit(), 2), (0, 1, 0, 3)) == [13]


def test_a_slow_rank_occupies_its_own_links_for_longer() -> None:
    links = FifoLinks(unit(stragglers={1: 3}), 3)
    assert send(links, (0, 1, 5, 0), (1, 2, 5, 0), (2, 0, 5, 0)) == [25, 25, 15]


def test_hosts_share_their_uplink_but_not_their_inside() -> None:
    network = unit(hosts=2, host_latency=1, host_bandwidth=5)
    inside = FifoLinks(network, 4)
    assert send(inside, (0, 1, 5, 0), (1, 0, 5, 0)) == [2, 2]
    outside = FifoLinks(network, 4)
    # Ranks 0 and 1 share an uplink of 1 byte/s, so the second message waits 5 s for the first.
    assert send(outside, (0, 2, 5, 0), (1, 3, 5, 0)) == [15, 20]
    # Two hosts send to two other hosts and share no link.
    apart = FifoLinks(network, 8)
    assert send(apart, (0, 4, 5, 0), (2, 6, 5, 0)) == [15, 15]


def test_messages_within_a_host_do_not_use_its_uplink() -> None:
    links = FifoLinks(unit(hosts=2, host_latency=1, host_bandwidth=5), 4)
    assert send(links, (0, 1, 5, 0), (0, 2, 5, 0), (3, 2, 5, 0)) == [2, 16, 2]


def test_a_graph_takes_the_way_of_fewest_hops_at_its_slowest_link() -> None:
    links = {(0, 1): 5.0, (1, 2): 1.0, (0, 3): 9.0, (3, 4): 9.0, (4, 2): 9.0}
    net = FifoLinks(unit(links=links), 5)
    transfers = net.send(np.array([0]), np.array([2]), np.array([5.0]), np.array([0.0]))
    ways = [net.names[int(link[0])] for link, *_ in transfers.hops]
    assert ways == ["0 to 1", "1 to 2"]
    assert transfers.delivery.tolist() == [15]


def test_a_graph_without_a_way_says_which_ranks() -> None:
    links = FifoLinks(unit(links={(0, 1): 1.0}), 3)
    with pytest.raises(InvalidInput, match="no route leads from rank 1 to rank 0"):
        links.depart(1, 0, 5, 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stragglers": {4: 2}}, r"stragglers=\[4\]"),
        ({"links": {(0, 9): 1.0}}, r"links \[\(0, 9\)\]"),
        ({"links": {(1, 1): 1.0}}, "pairs of different ranks"),
        ({"hosts": ((0, 1),)}, "every rank from 0 to 2"),
    ],
)
def test_a_network_that_does_not_fit_the_size_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        FifoLinks(unit(**fields), 3)


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, float, float]]:
    """Draw messages among 5 ranks; each source sends its messages in the order of its rows."""
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 9), st.floats(0, 20)),
            min_size=1,
            max_size=30,
        )
    )
    ready = sorted(row[3] for row in rows)
    return [
        (source, (source + step) % 5, float(nbytes), when)
        for (source, step, nbytes, _), when in zip(rows, ready, strict=True)
    ]


@given(rows=rounds(), jitter=st.sampled_from([0.0, 0.5]))
@settings(deadline=None)
def test_two_halves_in_two_processes_equal_one_call(
    rows: list[tuple[int, int, float, float]], jitter: float
) -> None:
    network = unit(jitter=jitter, stragglers={2: 2})
    together = send(FifoLinks(network, 5), *rows)
    mine = [FifoLinks(network, 5) for _ in range(5)]  # each rank knows only its own links
    first = [mine[source].depart(source, to, size, now) for source, to, size, now in rows]
    split = np.empty(len(rows))
    for row in np.argsort(first, kind="stable"):
        source, to, size, _ = rows[row]
        split[row] = mine[to].arrive(source, to, size, first[row])
    assert split.tolist() == together


@given(rows=rounds())
@settings(deadline=None)
def test_no_link_carries_more_than_its_bandwidth(
    rows: list[tuple[int, int, float, float]],
) -> None:
    links = FifoLinks(unit(hosts=2, host_bandwidth=2), 5)
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    transfers = links.send(columns[0], columns[1], columns[2] * 1.0, columns[3])
    spans: dict[int, list[tuple[float, float]]] = {}
    for link, start, *_ in transfers.hops:
        for number, begin, nbytes in zip(link, start, columns[2], strict=True):
            if number >= 0 and nbytes:
                end = float(begin + nbytes / links.bandwidth[number])
                spans.setdefault(int(number), []).append((float(begin), end))
    for busy in spans.values():
        ordered = sorted(busy)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ordered))


def test_jitter_is_drawn_by_seed_and_number_of_the_message() -> None:
    rows = [(0, 1, 1.0, 0.0), (0, 2, 1.0, 0.0), (1, 2, 1.0, 0.0)]
    jittery = unit(jitter=4, seed=1)
    once, again = send(FifoLinks(jittery, 3), *rows), send(FifoLinks(jittery, 3), *rows)
    other = send(FifoLinks(unit(jitter=4, seed=2), 3), *rows)
    still = send(FifoLinks(unit(), 3), *rows)
    assert once == again != other
    assert all(0 <= late - calm < 8 for late, calm in zip(once, still, strict=True))
    links = FifoLinks(jittery, 2)
    delays = [send(links, (0, 1, 0, 100 * k))[0] - 100 * k - 10 for k in range(50)]
    assert len(set(delays)) == 50
    assert 0 <= min(delays) < 1
    assert 3 < max(delays) < 4
