"""Test partitions: by hand, by parameters, and the cheapest one against all possible ones."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.schedules.pipeline_stages import balance_costs, balance_parameters, explicit_partition


def test_by_hand_counts_blocks() -> None:
    assert explicit_partition([2, 1, 3], 6) == [0, 2, 3, 6]
    assert explicit_partition([6], 6) == [0, 6]


@pytest.mark.parametrize("blocks", [[], [0, 6], [2, 3], [4, 3], [-1, 7]], ids=str)
def test_a_stage_without_blocks_or_blocks_without_a_stage_are_refused(blocks: list[int]) -> None:
    with pytest.raises(InvalidInput, match="one block or more, 6 in total"):
        explicit_partition(blocks, 6)


def test_the_drawn_examples() -> None:
    assert balance_costs([4, 1, 1, 4], 2) == [0, 2, 4]
    assert balance_costs([1, 1, 8], 2) == [0, 2, 3]


def test_parameters_are_balanced_and_blocks_without_any_go_along() -> None:
    assert balance_parameters([0, 100, 0, 60, 0, 40], 2) == [0, 2, 6]
    assert balance_parameters([10, 10, 10, 10], 4) == [0, 1, 2, 3, 4]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_contiguous_cut_is_cheaper(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def greatest(edges: list[int]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    edges = balance_costs(costs, stages)
    assert len(edges) == stages + 1
    assert edges[0] == 0
    assert edges[-1] == len(costs)
    assert all(a < b for a, b in pairwise(edges))
    inner = combinations(range(1, len(costs)), stages - 1)
    assert greatest(edges) == min(greatest([0, *cut, len(costs)]) for cut in inner)


@pytest.mark.parametrize("stages", [0, 4])
def test_more_stages_than_blocks_are_refused_with_what_is_allowed(stages: int) -> None:
    with pytest.raises(InvalidInput, match=f"{stages} stages of 3 blocks.* 1 to 3 stages"):
        balance_costs([1.0, 1.0, 1.0], stages)
