"""Test max-min fair sharing by hand, by its definition, and across implementations."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest
from flow_networks import as_network, columns
from hypothesis import given
from hypothesis import strategies as st

from labkit.network import FREE, Flows, Network, carrier, finish_times, max_min
from labkit.network.shared import MAX_FLOWS, FlowTable, shared_links
from labkit.schedules import Round
from labkit.simulate import simulate
from tests.acceptance.flow_sets import FLOW_SETS, FlowSet

by_hand = pytest.mark.parametrize("each", FLOW_SETS, ids=lambda each: each.name)


@by_hand
def test_flows_drain_when_arithmetic_says_so(each: FlowSet) -> None:
    found = finish_times(columns(each), each.nbytes, each.start, each.bandwidth)
    assert found.tolist() == pytest.approx(each.drained, rel=1e-9)


@by_hand
def test_the_simulator_of_rounds_says_the_same(each: FlowSet) -> None:
    network, ends = as_network(each)
    parts = [round(100 * nbytes) for nbytes in each.nbytes]  # a chunk is a hundredth of a byte
    size = 1 + max(map(max, ends))
    start = np.zeros(size)
    start[[source for source, _ in ends]] = each.start
    rows = Round(*zip(*ends, strict=True), chunk=0, span=parts, reduce=False)
    done = simulate(lambda _: [rows], size, max(parts) / 100, network, compute=start, trace=True)
    found = done.finish[[destination for _, destination in ends]]
    assert found == pytest.approx(each.drained, rel=1e-9)
    assert done.trace is not None
    assert done.trace.delivery == pytest.approx(each.drained, rel=1e-9)
    assert done.trace.start == pytest.approx(each.start)
    carried = (done.trace.link_stop - done.trace.link_start) * done.trace.link_share
    for link in range(len(each.bandwidth)):
        here = done.trace.link == done.links.index(f"{2 * link} to {2 * link + 1}")
        assert carried[here].sum() == pytest.approx(
            sum(n for n, way in zip(each.nbytes, each.ways, strict=True) if link in way)
            / each.bandwidth[link]
        )


@by_hand
def test_messages_one_by_one_are_delivered_then(each: FlowSet) -> None:
    network, ends = as_network(each)
    found, begun = run_events(network, 1 + max(map(max, ends)), ends, each.nbytes, each.start)
    assert found == pytest.approx(each.drained, rel=1e-9)
    assert begun == pytest.approx(each.start)


def run_events(
    network: Network, size: int, ends: Any, nbytes: Any, start: Any
) -> tuple[list[float], list[float]]:
    """Return deliveries and starts of messages from an event-driven simulation."""
    carries, found = carrier(network, size), {}
    coming = [(when, number) for number, when in enumerate(start)]
    heapq.heapify(coming)
    while coming or carries.next < np.inf:
        if coming and coming[0][0] < carries.next:
            when, number = heapq.heappop(coming)
            carries.start(number, *ends[number], nbytes[number], when)
        else:
            for number, begin, delivery in carries.step():
                found[number] = delivery, begin
    times = [found[number] for number in range(len(ends))]
    return [time[0] for time in times], [time[1] for time in times]


def run_table(network: Network, size: int, ends: Any, nbytes: Any, start: Any) -> list[float]:
    """Return message deliveries from a shared table, one process per rank, on a hand-set clock."""
    memory = np.zeros(shared_links(network, size).length)
    processes = [shared_links(network, size) for _ in range(size)]
    for process in processes:
        process.attach(memory)
    messages = {}
    for number in np.argsort(start, kind="stable").tolist():
        ticket = processes[ends[number][0]].depart(
            *ends[number], nbytes[number], FREE, float(start[number])
        )
        messages[number] = (ticket, *ends[number], nbytes[number])
        # Each receiver of a message under way reads the table, and learns which messages have
        # started.
        for one, message in messages.items():
            processes[ends[one][1]].arrive([message], float(start[number]))
    now = max(start)
    return [processes[ends[n][1]].arrive([messages[n]], now) for n in range(len(ends))]


@by_hand
def test_processes_that_share_a_table_agree_on_it(each: FlowSet) -> None:
    network, ends = as_network(each)
    found = run_table(network, 1 + max(map(max, ends)), ends, each.nbytes, each.start)
    assert found == pytest.approx(each.drained, rel=1e-9)


@st.composite
def flows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Draw the routes of 1 to 12 flows over 1 to 6 links, and the links' bandwidths."""
    links = draw(st.integers(1, 6))
    way = st.lists(st.integers(0, links - 1), min_size=1, max_size=4, unique=True)
    ways = draw(st.lists(way, min_size=1, max_size=12))
    speed = st.one_of(st.integers(1, 4).map(float), st.floats(1e-3, 1e9))
    bandwidth = np.array(draw(st.lists(speed, min_size=links, max_size=links)))
    return np.array([[*each, *[-1] * (4 - len(each))] for each in ways]), bandwidth


@given(flows())
def test_every_flow_has_a_bottleneck_on_which_nobody_is_faster(
    given: tuple[np.ndarray, np.ndarray],
) -> None:
    ways, bandwidth = given
    rate = max_min(ways, bandwidth)
    over = [(ways == link).any(axis=1) for link in range(len(bandwidth))]
    load = np.array([rate[here].sum() for here in over])
    assert (load <= bandwidth * (1 + 1e-9)).all()
    full = load >= bandwidth * (1 - 1e-9)
    for own, way in zip(rate, ways, strict=True):
        assert any(
            full[link] and own >= rate[over[link]].max() * (1 - 1e-9) for link in way[way >= 0]
        )


NETWORKS = [
    Network(latency=0.5, bandwidth=2),
    Network(latency=0.5, bandwidth=2, stragglers={1: 3.0}, jitter=0.25, seed=4),
    Network(latency=0.5, bandwidth=2, hosts=2, host_bandwidth=5, host_latency=0.125),
    Network(latency=0, bandwidth=2, links={(a, (a + 1) % 5): 1.0 + a for a in range(5)}),
]


@given(
    network=st.sampled_from(NETWORKS),
    rows=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 4), st.integers(0, 9), st.integers(0, 40)),
        min_size=1,
        max_size=20,
    ),
)
def test_a_table_and_a_simulation_of_events_give_the_same_times(
    network: Network, rows: list[tuple[int, int, int, int]]
) -> None:
    rows = sorted(rows, key=lambda row: row[3])
    ends = [(source, (source + step) % 5) for source, step, _, _ in rows]
    nbytes, start = [row[2] for row in rows], [row[3] / 4 for row in rows]
    simulated, _ = run_events(network, 5, ends, nbytes, start)
    assert run_table(network, 5, ends, nbytes, start) == pytest.approx(simulated, rel=1e-9)


def test_a_round_waits_on_its_link_for_the_rounds_before_it() -> None:
    flows = Flows(np.array([2.0, 2.0]), 1)
    way, turn = np.array([[0], [0], [0], [1]]), np.array([1, 1, 2, 2])
    flows.start(np.arange(4), way, turn, np.array([4.0, 4.0, 4.0, 4.0]))
    numbers, times = flows.run(np.inf)
    assert dict(zip(numbers.tolist(), times.tolist(), strict=True)) == {0: 4, 1: 4, 2: 6, 3: 2}


def test_a_message_handed_over_at_once_shares_the_link_with_a_round() -> None:
    flows = Flows(np.array([2.0]), 1)
    turn = np.array([3, FREE])
    flows.start(np.arange(2), np.zeros((2, 1), np.int64), turn, np.array([4.0, 4.0]))
    assert flows.run(np.inf)[1].tolist() == [4, 4]


def test_a_table_forgets_what_has_drained_and_has_room_when_something_drains() -> None:
    table = FlowTable(Network(latency=0, bandwidth=1), 2)
    table.attach(np.zeros(table.length))
    first = table.depart(0, 1, 1, FREE, 0.0)
    for _ in range(MAX_FLOWS - 1):
        assert table.room(0.0) <= 0
        last = table.depart(0, 1, 1, FREE, 0.0)
    assert table.room(0.0) == pytest.approx(MAX_FLOWS)
    assert table.arrive([(last, 0, 1, 1)], 0.0) == pytest.approx(MAX_FLOWS)
    later = table.depart(0, 1, 3, FREE, 2.0 * MAX_FLOWS)
    assert table.arrive([(first, 0, 1, 1)], 2.0 * MAX_FLOWS) <= 2 * MAX_FLOWS
    assert table.arrive([(later, 0, 1, 3)], 2.0 * MAX_FLOWS) == pytest.approx(2 * MAX_FLOWS + 3)


def test_what_joins_later_is_known_to_who_asks_again() -> None:
    network = Network(latency=1, bandwidth=2)
    table = shared_links(network, 3)
    table.attach(np.zeros(table.length))
    message = (table.depart(0, 2, 8, FREE, 0.0), 0, 2, 8)
    assert table.arrive([message], 0.0) == 5
    version = table.version
    table.depart(1, 2, 8, FREE, 2.0)
    assert table.version != version
    assert table.arrive([message], 2.0) == 2 + 4 + 1


@pytest.mark.parametrize(
    ("network", "pairs", "by_fifo", "by_hand"),
    [
        # Each of k senders uses a k-th of the uplink's bandwidth, so none slows another down.
        *(
            (
                {"bandwidth": float(k), "hosts": k, "host_bandwidth": 1.0},
                [(rank, k + rank) for rank in range(k)],
                12 * (2 - 1 / k),
                12.0,
            )
            for k in (2, 8, 32)
        ),
        # A master's link is 8 times as fast as the links of its 8 workers.
        (
            {
                "bandwidth": 1.0,
                "links": {(rank, 0): 1.0 for rank in range(2, 10)} | {(0, 1): 8.0},
            },
            [(rank, 1) for rank in range(2, 10)],
            12 * (1 + 7 / 8),
            12.0,
        ),
    ],
)
def test_a_link_faster_than_its_senders_does_not_slow_them_down(
    network: dict[str, Any], pairs: list[tuple[int, int]], by_fifo: float, by_hand: float
) -> None:
    size = 1 + max(map(max, pairs))
    rows = Round(*zip(*pairs, strict=True), reduce=False)
    times = {
        sharing: simulate(
            lambda _: [rows], size, 12.0, Network(latency=0, sharing=sharing, **network)
        ).seconds
        for sharing in ("fair", "fifo")
    }
    assert times == {"fair": pytest.approx(by_hand), "fifo": pytest.approx(by_fifo)}
