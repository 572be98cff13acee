"""Test combinations: all, or some at random without repeats, and the same for the same seed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.jobs.sweep.grid import Draw, all_combinations, random_combinations

AXES = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple),
    min_size=1,
)


def test_the_last_parameter_changes_fastest() -> None:
    assert all_combinations({"a": (1, 2), "b": ("x", "y")}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


@given(AXES)
def test_every_combination_comes_once(axes: dict[str, tuple[int, ...]]) -> None:
    found = [tuple(combination.values()) for combination in all_combinations(axes)]
    assert sorted(found) == sorted(itertools.product(*axes.values()))


@given(AXES, st.integers(0, 9), st.data())
def test_some_are_different_ones_of_all(
    axes: dict[str, tuple[int, ...]], seed: int, data: st.DataObject
) -> None:
    grid = all_combinations(axes)
    count = data.draw(st.integers(1, len(grid)))
    found = random_combinations(axes, count, seed)
    assert len(found) == count
    assert len({tuple(one.items()) for one in found}) == count
    assert all(one in grid for one in found)
    assert found == random_combinations(axes, count, seed)


def test_another_seed_gives_others() -> None:
    axes = {"a": tuple(range(100))}
    assert random_combinations(axes, 5, 0) != random_combinations(axes, 5, 1)


def test_a_grid_too_large_to_be_listed_still_gives_some() -> None:
    axes = {name: tuple(range(10_000)) for name in "abcde"}
    with pytest.raises(InvalidInput, match="combinations exceed the maximum of a sweep"):
        all_combinations(axes)
    assert len(random_combinations(axes, 20, 0)) == 20


def test_draws_and_lists_mix() -> None:
    found = random_combinations({"rate": Draw(0.1, 1.0), "depth": (1, 2)}, 30, 0)
    assert {one["depth"] for one in found} == {1, 2}
    assert len({one["rate"] for one in found}) > 20


@pytest.mark.parametrize(
    ("count", "words"), [(0, "impossible"), (10_001, "impossible"), (3, "exceeds the 2")]
)
def test_an_impossible_count_is_refused(count: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        random_combinations({"a": (1, 2)}, count, 0)


def test_a_distribution_has_no_every() -> None:
    with pytest.raises(InvalidInput, match="--random N"):
        all_combinations({"rate": Draw(0.1, 1.0)})


def test_a_distribution_too_narrow_for_the_count_is_refused() -> None:
    with pytest.raises(InvalidInput, match="give only 2 different"):
        random_combinations({"rate": Draw(1.0, 1.001)}, 3, 0)
