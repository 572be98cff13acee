"""Hosts of any shape."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.schedules import allreduce, hierarchical, host_groups
from labkit.schedules.check import check


@st.composite
def hosts_of_any_shape(draw: st.DrawFn) -> list[list[int]]:
    size = draw(st.integers(1, 12))
    ranks = draw(st.permutations(range(size)))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    edges = [0, *cuts, size]
    return [ranks[a:b] for a, b in itertools.pairwise(edges)]


@given(hosts=hosts_of_any_shape())
@settings(deadline=None)
def test_any_hosts_end_with_the_sum_and_send_what_the_formula_says(hosts: list[list[int]]) -> None:
    size = sum(map(len, hosts))
    schedule = partial(hierarchical, hosts=hosts)
    check(allreduce(schedule), size, hierarchical.counts(size, hosts))


def test_a_number_of_ranks_a_host_fills_hosts_in_order() -> None:
    assert host_groups(5, 2) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], [[0, 1], [-1]]])
def test_hosts_hold_every_rank_once(hosts: list[list[int]]) -> None:
    with pytest.raises(InvalidInput, match="every rank from 0 to 2 must stand in exactly one host"):
        host_groups(3, hosts)


def test_a_host_has_a_rank() -> None:
    with pytest.raises(InvalidInput, match="hosts=0"):
        host_groups(3, 0)
