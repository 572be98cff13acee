"""Test hierarchical schedules on hosts with any numbers of ranks."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.schedules import ALLREDUCE, allreduce, host_groups, two_level
from labkit.schedules.interpreter import verify_schedule


@st.composite
def hosts_of_any_shape(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(1, 12))
    ranks = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    edges = [0, *cuts, size]
    return [ranks[a:b] for a, b in itertools.pairwise(edges)]


IN_LEVELS = [name for name, each in ALLREDUCE.items() if each.layout == "hosts"]


@pytest.mark.parametrize("name", IN_LEVELS)
@given(hosts=hosts_of_any_shape())
@settings(deadline=None)
def test_any_hosts_end_with_the_sum_and_send_what_the_formula_says(
    name: str, hosts: list[list[int]]
) -> None:
    size = sum(map(len, hosts))
    schedule = partial(ALLREDUCE[name], hosts=hosts)
    verify_schedule(allreduce(schedule), size, ALLREDUCE[name].counts(size, hosts))


@given(hosts=hosts_of_any_shape())
@settings(deadline=None)
def test_as_much_leaves_each_host_in_two_levels_as_any_sum_must(hosts: list[list[int]]) -> None:
    groups = [group for group in hosts if group]
    size, parts = sum(map(len, groups)), min(map(len, groups))
    host_of = {rank: host for host, group in enumerate(groups) for rank in group}
    left = dict.fromkeys(range(len(groups)), 0)
    for each in two_level(size, hosts):
        for source, destination, _, span, _ in each.rows():
            if host_of[source] != host_of[destination]:
                left[host_of[source]] += span
    # Each host sends 2(h - 1)/h of the buffer, in chunks of n / (P h) bytes.
    assert set(left.values()) == {2 * (len(groups) - 1) * parts}


def test_what_is_between_hosts_is_the_schedule_without_its_ends() -> None:
    for name in ("two_level", "two_level_butterfly"):
        rounds = [each.rows() for each in ALLREDUCE[name](5, hosts=[[0, 1], [2, 3, 4]])]
        between = ALLREDUCE[name].between
        assert between is not None
        assert [each.rows() for each in between(5, [[0, 1], [2, 3, 4]])] == rounds[1:-1]


def test_a_number_of_ranks_a_host_fills_hosts_in_order() -> None:
    assert host_groups(5, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], [[0, 1], [-1]]])
def test_hosts_hold_every_rank_once(hosts: list[list[int]]) -> None:
    with pytest.raises(InvalidInput, match="every rank from 0 to 2 must be on exactly one host"):
        host_groups(3, hosts)


def test_a_host_has_a_rank() -> None:
    with pytest.raises(InvalidInput, match="hosts=0"):
        host_groups(3, 0)
