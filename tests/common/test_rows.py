"""Test batch plans: each sample once per epoch, and global batches independent of the ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.rows import BatchPlan, cut

capacities = st.lists(st.floats(0.01, 100), min_size=1, max_size=9).map(tuple)
plans = st.builds(
    BatchPlan,
    rows=st.integers(1, 200),
    batch_size=st.integers(1, 90),
    capacities=capacities,
    seed=st.integers(0, 2**31),
    owned=st.booleans(),
)


@given(st.integers(0, 10_000_000), capacities)
def test_a_cut_covers_all_rows_in_order(total: int, shares: tuple[float, ...]) -> None:
    ends = cut(total, shares)
    assert (ends[0], ends[-1]) == (0, total)
    assert ends == sorted(ends)


@given(st.integers(0, 10_000_000), st.integers(1, 64))
def test_equal_capacities_get_parts_that_differ_by_one_row_at_most(total: int, ranks: int) -> None:
    sizes = np.diff(cut(total, [1.0] * ranks))
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(0, 10_000), capacities)
def test_a_part_is_within_a_row_of_its_share(total: int, shares: tuple[float, ...]) -> None:
    sizes = np.diff(cut(total, shares))
    wanted = total * np.array(shares) / np.sum(shares)
    assert np.abs(sizes - wanted).max() < 1 + 1e-6


def test_ten_rows_by_capacities_1_1_2_are_cut_at_2_and_5() -> None:
    assert cut(10, [1, 1, 2]) == [0, 2, 5, 10]


def test_a_share_that_is_a_whole_number_is_not_rounded_down() -> None:
    assert cut(10, [0.1, 0.2, 0.7]) == [0, 1, 3, 10]  # 0.1 + 0.2 is slightly more than 0.3
    assert np.diff(cut(3 * 7, [1 / 3] * 3)).tolist() == [7, 7, 7]


@given(plans, st.integers(0, 3))
def test_every_row_is_seen_exactly_once_an_epoch(plan: BatchPlan, epoch: int) -> None:
    seen = np.concatenate(plan.global_batches(epoch))
    assert sorted(seen) == list(range(plan.rows))


@given(plans, st.integers(0, 3))
def test_the_ranks_parts_are_as_large_as_announced_and_make_the_global_batch(
    plan: BatchPlan, epoch: int
) -> None:
    parts = [plan.local(rank, epoch) for rank in range(len(plan.capacities))]
    for step in range(plan.steps_per_epoch):
        sizes = [len(part[step]) for part in parts]
        assert sizes == plan.sizes(step)
        left = plan.rows - step * plan.batch_size
        assert sum(sizes) == min(plan.batch_size, left)


@given(plans, capacities)
def test_global_batches_do_not_depend_on_the_ranks_unless_rows_are_owned(
    plan: BatchPlan, others: tuple[float, ...]
) -> None:
    if plan.owned:
        return
    one = BatchPlan(plan.rows, plan.batch_size, others, plan.seed)
    for ours, theirs in zip(plan.global_batches(1), one.global_batches(1), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(plans)
def test_owned_rows_stay_with_their_rank(plan: BatchPlan) -> None:
    owned = BatchPlan(plan.rows, plan.batch_size, plan.capacities, plan.seed, owned=True)
    ranks = range(len(plan.capacities))
    assert sorted(np.concatenate([owned.own_rows(rank) for rank in ranks])) == list(
        range(plan.rows)
    )
    for rank in ranks:
        own = set(owned.own_rows(rank).tolist())
        for epoch in range(3):
            assert set(np.concatenate(owned.local(rank, epoch)).tolist()) == own


def test_rows_that_are_not_owned_move_between_ranks() -> None:
    plan = BatchPlan(100, 10, (1.0, 1.0))
    first, second = (set(np.concatenate(plan.local(0, epoch)).tolist()) for epoch in (0, 1))
    assert first != second


@pytest.mark.parametrize("owned", [False, True])
def test_epochs_and_seeds_shuffle_differently_and_repeat(owned: bool) -> None:
    plan = BatchPlan(64, 8, (1.0, 1.0), seed=1, owned=owned)
    again = BatchPlan(64, 8, (1.0, 1.0), seed=1, owned=owned)
    other = BatchPlan(64, 8, (1.0, 1.0), seed=2, owned=owned)
    order = np.concatenate(plan.global_batches(0)).tolist()
    assert np.concatenate(again.global_batches(0)).tolist() == order
    assert np.concatenate(plan.global_batches(1)).tolist() != order
    assert np.concatenate(other.global_batches(0)).tolist() != order


def test_with_more_ranks_than_rows_some_ranks_have_empty_batches_of_every_step() -> None:
    plan = BatchPlan(rows=3, batch_size=2, capacities=(1.0,) * 5)
    assert plan.steps_per_epoch == 2
    assert [sum(plan.sizes(step)) for step in range(2)] == [2, 1]
    assert all(len(plan.local(rank, 0)) == 2 for rank in range(5))


@given(plans, st.integers(1, 5))
def test_a_cap_on_steps_keeps_the_first_batches(plan: BatchPlan, steps: int) -> None:
    capped = BatchPlan(plan.rows, plan.batch_size, plan.capacities, plan.seed, steps, plan.owned)
    assert capped.steps_per_epoch == min(steps, plan.steps_per_epoch)
    for short, full in zip(capped.global_batches(1), plan.global_batches(1), strict=False):
        np.testing.assert_array_equal(np.sort(short), np.sort(full))
