"""Test what each rank holds after a schedule's messages, and its name in the literature."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.schedules import ALLREDUCE, COLLECTIVES, Round, ring
from labkit.schedules.interpreter import chunk_name, follow, message_size, span_name, sum_name


@pytest.mark.parametrize("size", range(2, 13))
@pytest.mark.parametrize("name", ALLREDUCE)
def test_every_allreduce_ends_with_every_value_once_everywhere(name: str, size: int) -> None:
    holdings = follow(ALLREDUCE[name], size)
    assert holdings.complete
    assert (np.diagonal(holdings.held[0], axis1=0, axis2=2) == 1).all()
    assert holdings.held[0].sum() == size * holdings.chunks


def test_a_reduce_is_not_complete_everywhere() -> None:
    assert not follow(COLLECTIVES["reduce_tree"].schedule, 4).complete


def test_in_the_ring_partial_sums_grow_by_one_rank_a_round() -> None:
    holdings = follow(ring, 4)
    names = [sum_name(holdings.held[number, 0, 0], 0) for number in range(4)]
    assert names == ["a0", "a0", "a0", "Σa"]
    assert sum_name(holdings.held[1, 1, 0], 0) == "a1"
    assert [sum_name(holdings.held[k, 3, 0], 0) for k in range(3)] == ["a3", "a3", "a1+a2+a3"]


def test_what_came_in_a_round_is_new_only_then() -> None:
    holdings = follow(ring, 2)
    assert holdings.new(0).sum() == 0
    assert holdings.new(1).sum() == 2  # each rank added one value to one chunk
    assert holdings.new(2).sum() == 2  # and received the other chunk's missing value


@pytest.mark.parametrize(
    ("held", "room", "expected"),
    [
        ([1, 1, 0, 0], 9, "c0+c1"),
        ([1, 1, 1, 0, 0, 0, 1, 0], 8, "c0–2+6"),
        ([1, 0, 1, 0, 1, 0, 1, 0], 7, "4/8"),
        ([1, 1, 1], 2, "Σc"),
        ([2, 0, 1], 9, "2c0+c2"),
        ([2, 1, 1, 1, 0], 5, "5 values"),
    ],
)
def test_a_sum_is_written_in_the_room_it_has(held: list[int], room: int, expected: str) -> None:
    assert sum_name(np.array(held), 2, room) == expected


def test_chunks_are_letters_and_messages_parts_of_n() -> None:
    assert [chunk_name(place) for place in (0, 25, 26)] == ["a", "z", "a1."]
    assert (span_name(1, 1), span_name(1, 3)) == ("b", "b–d")
    mixed = Round([0, 1], [1, 0], [0, 2], [1, 3], reduce=True)
    assert message_size(mixed, 8) == "n/8 to 3n/8"
    assert message_size(mixed.take(np.array([0])), 1) == "n"
