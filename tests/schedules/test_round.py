"""Test a round of messages as data: its columns, its rows and their meaning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.schedules.interpreter import ScheduleError, final_buffers
from labkit.schedules.round import Round, boundaries, circle, count_chunks, join, run_concurrently


def test_one_value_fills_a_column() -> None:
    each = Round([0, 1], [1, 2], reduce=True)
    assert each.rows() == [(0, 1, 0, 1, True), (1, 2, 0, 1, True)]


def test_a_rank_finds_its_messages_sent_in_order_of_rows_received_in_order_of_sources() -> None:
    each = Round([2, 0, 1, 0], [0, 2, 2, 1], [5, 6, 7, 8], reduce=False)
    assert [row[2] for row in each.sent_by(0).rows()] == [6, 8]
    assert [row[:3] for row in each.received_by(2).rows()] == [(0, 2, 6), (1, 2, 7)]
    assert len(each.received_by(3)) == 0


def test_on_renames_ranks_and_cuts_chunks() -> None:
    each = Round([0], [1], [2], [3], reduce=True).on([7, 9], parts=4)
    assert each.rows() == [(7, 9, 8, 12, True)]


def test_beside_joins_rounds_and_none_pauses() -> None:
    one = [Round([0], [1], reduce=True), Round([1], [0], reduce=False)]
    late = [None, Round([2], [3], reduce=True)]
    first, second = run_concurrently([one, late])
    assert first.rows() == one[0].rows()
    assert second.rows() == join([one[1], late[1]]).rows()  # type: ignore[list-item]


def test_chunks_are_counted_to_the_end_of_the_last_span() -> None:
    assert count_chunks([Round([0], [1], 2, 3, reduce=True)]) == 5
    assert count_chunks([]) == 1


@given(length=st.integers(0, 200), chunks=st.integers(1, 40))
def test_boundaries_cut_a_buffer_of_any_length_into_nearly_equal_parts(
    length: int, chunks: int
) -> None:
    edges = boundaries(length, chunks)
    sizes = np.diff(edges)
    assert len(sizes) == chunks
    assert (edges[0], edges[-1]) == (0, length)
    assert sizes.min() >= 0
    assert sizes.max() - sizes.min() <= 1


def test_the_circle_holds_every_pair_once_and_no_step_shares_a_receiver() -> None:
    source, destination = circle(5)
    pairs = set(zip(source.tolist(), destination.tolist(), strict=True))
    assert pairs == {(a, b) for a in range(5) for b in range(5) if a != b}
    for step in destination.reshape(4, 5):
        assert len(set(step.tolist())) == 5


def test_contributions_are_added_in_order_of_rank_the_own_value_in_its_place() -> None:
    # Rank 1 receives values from ranks 2 and 0. In order of rank, (1e8 + 1) - 1e8 loses the 1 in
    # float32; starting with rank 1's value or both large values would keep it.
    values = np.array([[1e8], [1], [-1e8]], np.float32)
    after = final_buffers([Round([2, 0], [1, 1], reduce=True)], values)
    assert after[:, 0].tolist() == [1e8, 0.0, -1e8]


def test_messages_carry_the_values_from_before_the_round() -> None:
    after = final_buffers([Round([0, 1], [1, 0], reduce=False)], np.array([[1], [2]]))
    assert after.tolist() == [[2], [1]]


@pytest.mark.parametrize("order", [[True, False], [False, True], [False, False]])
def test_a_replaced_chunk_receives_nothing_else(order: list[bool]) -> None:
    with pytest.raises(ScheduleError, match="rank 2 replaces chunk 0 and receives it again"):
        final_buffers([Round([0, 1], [2, 2], reduce=order)], np.zeros((3, 4)))


def test_messages_are_copied_among_several_lists_of_ranks() -> None:
    pair = Round([0, 1], [1, 0], [0, 1], reduce=True)
    both = pair.on([[4, 5], [8, 9]], parts=2, first=[0, 10])
    each = [pair.on([4, 5], 2, 0).rows(), pair.on([8, 9], 2, 10).rows()]
    assert both.rows() == [*each[0], *each[1]]
