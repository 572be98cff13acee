"""Common tests for every allreduce and every other collective."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.schedules import ALLREDUCE, COLLECTIVES, Round, allreduce, get_collective, ring
from labkit.schedules.interpreter import ScheduleError, execute, final_buffers, verify_schedule

SIZES = range(1, 18)
NAMES = [*ALLREDUCE, *COLLECTIVES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_ranks_end_with_what_is_promised_and_send_what_the_textbook_says(
    name: str, size: int
) -> None:
    verify_schedule(get_collective(name), size, get_collective(name).counts(size))


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_pure(name: str) -> None:
    schedule = get_collective(name).schedule
    assert [each.rows() for each in schedule(6)] == [each.rows() for each in schedule(6)]


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_sends_nothing(name: str) -> None:
    assert list(get_collective(name).schedule(1)) == []


@given(
    name=st.sampled_from(list(ALLREDUCE)),
    size=st.integers(1, 12),
    length=st.integers(0, 40),
    dtype=st.sampled_from(["float16", "float32", "float64", "int32"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_all_ranks_hold_the_same_bits_for_any_length_and_dtype(
    name: str, size: int, length: int, dtype: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    buffers = (random.normal(size=(size, length)) * 1000).astype(dtype)
    before = buffers.copy()
    final = final_buffers(ALLREDUCE[name](size), buffers)
    assert final.dtype == buffers.dtype
    assert all(row.tobytes() == final[0].tobytes() for row in final)
    exact = buffers.astype(np.float64).sum(axis=0)
    # Every addition rounds by at most half a unit of the largest partial sum.
    limit = np.abs(buffers.astype(np.float64)).sum(axis=0) * size
    unit = np.finfo(dtype).eps if buffers.dtype.kind == "f" else 0.0
    assert (np.abs(final[0].astype(np.float64) - exact) <= limit * unit).all()
    assert buffers.tobytes() == before.tobytes()


# Messages and buffers sent by all ranks, in the symbols of the table, independent of `textbook`.
def _in_all(size: int) -> Iterator[tuple[str, int, float]]:
    lg = size.bit_length() - 1
    power, extra, hosts = 1 << lg, size - (1 << lg), min(size, 2)
    spread = 2 * size * (size - 1), 2 * (size - 1)
    yield "all_to_all", size * (size - 1), size * (size - 1)
    yield "master_worker", 2 * (size - 1), 2 * (size - 1)
    yield "tree", 2 * (size - 1), 2 * (size - 1)
    yield "butterfly", power * lg + 2 * extra, power * lg + 2 * extra
    yield "rabenseifner", 2 * power * lg + 2 * extra, 2 * (power - 1) + 2 * extra
    yield "hierarchical", 2 * (size - hosts) + 2 * hosts * (hosts - 1), 2 * (size - 1)
    parts = max(size // 2, 1)  # the larger host may have a rank that owns no chunk
    inside = 2 * sum(parts * (ranks - 1) for ranks in (size - size // 2, size // 2) if ranks)
    yield "two_level", inside + 2 * parts * hosts * (hosts - 1), 2 * (size - 1)
    yield "two_level_butterfly", inside + parts * hosts * (hosts - 1), 2 * (size - 1)
    for name in ("ring", "round_robin", "spanning_trees"):
        yield name, *spread


@pytest.mark.parametrize("size", SIZES)
def test_counts_over_all_ranks_are_those_of_the_table(size: int) -> None:
    table = list(_in_all(size))
    assert {row[0] for row in table} == set(ALLREDUCE)
    for name, messages, volume in table:
        counted = get_collective(name).counts(size)
        assert counted.messages.sum() == messages, name
        assert counted.bytes(7.0).sum() == pytest.approx(7 * volume), name


def test_values_after_each_round_are_there_for_the_figures() -> None:
    buffers = np.array([[1, 10], [2, 20]])
    assert [values.tolist() for _, values in execute(ring(2), buffers)] == [
        [[3, 10], [2, 30]],
        [[3, 30], [3, 30]],
    ]


def test_an_unknown_name_is_answered_with_all_names() -> None:
    with pytest.raises(
        InvalidInput, match=r"'rnig' .did you mean 'ring'.*allowed: all_to_all, .*ring.*scatter"
    ):
        get_collective("rnig")
    with pytest.raises(InvalidInput, match="this schedule has no formula"):
        allreduce(_half).counts(2)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_goes_by_the_name_of_its_function_and_names_its_source(name: str) -> None:
    each = get_collective(name)
    assert each.__name__ == name
    assert each.paper or name in ("gather", "scatter")
    assert pickle.loads(pickle.dumps(each)) is each


def _half(size: int) -> Iterator[Round]:
    """Yield an incomplete allreduce in which only rank 0 receives the sum."""
    yield Round(range(1, size), [0] * (size - 1), reduce=True)


def _two_orders(size: int) -> Iterator[Round]:
    """Give ranks 0 and 1 ((v0 + v1) + v2) + v3, and ranks 2 and 3 (v0 + v1) + (v2 + v3)."""
    yield Round([1, 2], [0, 1], reduce=[True, False])
    yield Round([3], [2], reduce=True)
    yield Round([1, 3, 0], [0, 0, 2], reduce=True)
    yield Round([0, 2], [1, 3], reduce=False)


def test_the_checker_finds_a_rank_without_the_sum() -> None:
    with pytest.raises(ScheduleError, match="the final chunk 0 of rank 1 is not the sum"):
        verify_schedule(allreduce(_half), 3)


def test_the_checker_finds_a_missing_contribution() -> None:
    with pytest.raises(ScheduleError, match="is not the sum"):
        verify_schedule(allreduce(lambda size: list(ring(size))[1:]), 4)


def test_the_checker_finds_right_sums_that_differ_in_bits() -> None:
    with pytest.raises(ScheduleError, match="ranks differ in the bits of the sum"):
        verify_schedule(allreduce(_two_orders), 4)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (([0], [0]), "rank 0 sends to itself"),
        (([0], [5]), "or a rank that is not below 2"),
        (([0], [1], [0], [0]), "names no chunk"),
    ],
)
def test_the_checker_finds_rows_that_cannot_be(row: tuple[list[int], ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        verify_schedule(allreduce(lambda size: [Round(*row, reduce=True)]), 2)


def test_the_checker_finds_messages_that_the_textbook_does_not_know() -> None:
    with pytest.raises(ScheduleError, match="the textbook formula gives"):
        verify_schedule(get_collective("ring"), 4, get_collective("tree").counts(4))
