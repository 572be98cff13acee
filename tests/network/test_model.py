"""Test a network's fields, presets and JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.network import PRESETS, Network, Slowdown
from labkit.schedules import interpreter, spanning_trees


def test_presets_get_faster_and_nearer_in_order_of_their_names() -> None:
    order = ["wan", "100Mb", "1GbE", "10GbE", "100Gb-infiniband"]
    assert set(order) == set(PRESETS)
    latencies = [Network.named(name).latency for name in order]
    bandwidths = [Network.named(name).bandwidth for name in order]
    assert latencies == sorted(latencies, reverse=True)
    assert bandwidths == sorted(bandwidths)
    assert Network.named("1GbE").bandwidth == 1e9 / 8
    assert str(Network.named("1GbE")) == "1GbE"


def test_an_unknown_name_is_answered_with_the_presets() -> None:
    with pytest.raises(
        InvalidInput, match=r"'2GbE' .did you mean '1GbE'.*allowed: .*1GbE.*wan.*Network\(latency"
    ):
        Network.named("2GbE")


def test_parse_takes_a_name_a_network_or_nothing() -> None:
    mine = Network(latency=1e-3, bandwidth=1e6)
    assert Network.parse("wan") is PRESETS["wan"]
    assert Network.parse(mine) is mine
    assert Network.parse(None) is None


def positive() -> st.SearchStrategy[float]:
    return st.floats(1e-3, 1e12)


@given(
    fields=st.one_of(
        st.fixed_dictionaries(
            {"hosts": st.one_of(st.integers(1, 8), st.just(((0, 2), (1,))))},
            optional={"host_latency": st.floats(0, 1), "host_bandwidth": positive()},
        ),
        st.fixed_dictionaries({"links": st.just({(0, 1): 2.5, (1, 0): 3.0})}),
        st.just({}),
    ),
    slow=st.dictionaries(
        st.integers(0, 5),
        st.one_of(st.floats(1, 9), st.just(Slowdown(distribution="uniform", compute=2))),
    ),
    bandwidth=positive(),
)
def test_json_brings_back_the_same_network(
    fields: dict[str, Any], slow: dict[int, Any], bandwidth: float
) -> None:
    network = Network(
        latency=1e-6, bandwidth=bandwidth, jitter=1e-7, seed=3, stragglers=slow, **fields
    )
    text = json.dumps(network.model_dump(mode="json"))
    assert Network.model_validate(json.loads(text)) == network
    assert Network.model_validate_json(network.model_dump_json()) == network


@pytest.mark.parametrize(
    "fields",
    [
        {"latency": -1},
        {"bandwidth": 0},
        {"bandwidth": float("inf")},
        {"latency": float("nan")},
        {"jitter": -1},
        {"hosts": 0},
        {"stragglers": {0: 0.5}},
        {"stragglers": {-1: 2}},
        {"links": {(0, 1): -1}},
        {"links": {(0, 1): 1}, "hosts": 2},
        {"host_latency": 1},
        {"lattency": 1},
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        Network(**{"latency": 1e-3, "bandwidth": 1e6} | fields)


def test_a_factor_slows_both_compute_and_transfer() -> None:
    network = Network(latency=0, bandwidth=1, stragglers={1: 3})
    assert network.compute_factor(1, number=7) == network.transfer_factor(1) == 3
    assert network.compute_factor(0, number=7) == network.transfer_factor(0) == 1


@pytest.mark.parametrize("law", ["uniform", "exponential"])
def test_a_random_law_keeps_its_mean_repeats_and_never_speeds_up(law: Any) -> None:
    network = Network(
        latency=0, bandwidth=1, seed=5, stragglers={1: Slowdown(compute=2.5, distribution=law)}
    )
    drawn = np.array([network.compute_factor(1, number) for number in range(4000)])
    assert drawn.min() >= 1
    assert drawn.mean() == pytest.approx(2.5, abs=0.1)
    assert drawn.std() > 0.5
    assert drawn[17] == network.compute_factor(1, 17)
    other = network.model_copy(update={"seed": 6})
    assert drawn[17] != other.compute_factor(1, 17)


def test_a_network_lays_out_the_schedules_that_follow_it() -> None:
    links = {(a, b): 1.0 for a in range(3) for b in range(3) if abs(a - b) == 1}
    line = Network(latency=0, bandwidth=1, links=links)
    expected = [each.rows() for each in spanning_trees(3, links)]
    assert [each.rows() for each in line.schedule("spanning_trees")(3)] == expected
    hosts = Network(latency=0, bandwidth=1, hosts=((0, 2), (1, 3)))
    first = next(iter(hosts.schedule("hierarchical")(4)))
    assert first.rows() == [(2, 0, 0, 2, True), (3, 1, 0, 2, True)]
    assert interpreter.count_messages(hosts.schedule("ring")(4), 4).chunks == 4


def test_a_part_keeps_hosts_links_and_slow_ranks_under_new_numbers() -> None:
    hosts = Network(latency=0, bandwidth=1, hosts=2, stragglers={1: 2.0, 4: 3.0})
    seen = hosts.part([4, 1, 2], 5)
    assert seen.hosts == ((1,), (2,), (0,))
    assert {rank: each.compute for rank, each in seen.stragglers.items()} == {0: 3.0, 1: 2.0}
    graph = Network(latency=0, bandwidth=1, links={(0, 1): 5, (1, 2): 7, (2, 1): 8})
    assert graph.part([2, 1], 3).links == {(1, 0): 7, (0, 1): 8}
    assert Network.named("1GbE").part([3], 4) == Network.named("1GbE")
