"""Test that buckets contain every element once, in the order in which gradients are ready."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from labkit.exchange.bucket_layout import ALIGN, Bucket, aligned_starts, holders, pack

SIZES = {"float16": 2, "float32": 4, "float64": 8}
VARIABLES = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from(sorted(SIZES)), st.booleans()), max_size=12
)
LIMITS = st.integers(1, 2000)


def packed(
    variables: Sequence[tuple[int, str, bool]], limit: int, cut: bool, grouped: bool = False
) -> list[Bucket]:
    lengths, dtypes, ends = zip(*variables, strict=True) if variables else ([], [], [])
    groups = np.cumsum(ends).tolist() if grouped else None
    return pack(lengths, dtypes, [SIZES[dtype] for dtype in dtypes], limit, cut, groups)


def contents(buckets: list[Bucket]) -> list[list[tuple[int, int, int]]]:
    return [[(slot.variable, slot.start, slot.stop) for slot in bucket.slots] for bucket in buckets]


def test_small_gradients_are_fused_from_the_last_layer_on() -> None:
    buckets = pack([6, 2, 3, 1], ["float32"] * 4, [4] * 4, 16, cut=False)
    assert contents(buckets) == [[(3, 0, 1), (2, 0, 3)], [(1, 0, 2)], [(0, 0, 6)]]


def test_large_gradients_are_cut_where_that_is_asked_for() -> None:
    buckets = pack([6, 2, 3, 1], ["float32"] * 4, [4] * 4, 16, cut=True)
    assert contents(buckets) == [[(3, 0, 1), (2, 0, 3)], [(1, 0, 2), (0, 4, 6)], [(0, 0, 4)]]
    assert holders(buckets, 0) == [1, 2]
    assert holders(buckets, 3) == [0]


@given(VARIABLES, LIMITS, st.booleans(), st.booleans())
def test_every_element_is_in_one_bucket_once(
    variables: list[tuple[int, str, bool]], limit: int, cut: bool, grouped: bool
) -> None:
    buckets = packed(variables, limit, cut, grouped)
    for variable, (length, dtype, _) in enumerate(variables):
        seen = np.zeros(length, int)
        for bucket in buckets:
            for slot in bucket.slots:
                if slot.variable == variable:
                    assert bucket.dtype == dtype
                    seen[slot.start : slot.stop] += 1
        assert (seen == 1).all()


@given(VARIABLES, LIMITS, st.booleans(), st.booleans())
def test_a_bucket_is_one_piece_of_its_arena_and_shares_it_with_no_other(
    variables: list[tuple[int, str, bool]], limit: int, cut: bool, grouped: bool
) -> None:
    buckets = packed(variables, limit, cut, grouped)
    dtypes = [dtype for _, dtype, _ in variables]
    starts = aligned_starts(
        [n for n, _, _ in variables], dtypes, [SIZES[dtype] for dtype in dtypes]
    )
    used: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        used.setdefault(bucket.dtype, []).append((bucket.start, bucket.stop))
        for slot in bucket.slots:
            assert bucket.start <= slot.offset <= slot.offset + slot.length <= bucket.stop
            assert slot.offset == starts[slot.variable] + slot.start
    for spans in used.values():
        assert spans == sorted(spans, reverse=True)  # buckets are filled from the arena's end
        assert all(later[0] >= earlier[1] for later, earlier in pairwise(spans))


@given(VARIABLES, LIMITS)
def test_with_cut_no_bucket_holds_more_than_the_limit(
    variables: list[tuple[int, str, bool]], limit: int
) -> None:
    for bucket in packed(variables, limit, cut=True):
        held = sum(slot.length for slot in bucket.slots)
        assert held * bucket.itemsize <= max(limit + limit // 8, bucket.itemsize)
        assert bucket.nbytes < held * bucket.itemsize + ALIGN * len(bucket.slots)


@given(VARIABLES, LIMITS)
def test_without_cut_variables_stay_whole_and_only_one_alone_exceeds_the_limit(
    variables: list[tuple[int, str, bool]], limit: int
) -> None:
    for bucket in packed(variables, limit, cut=False):
        assert all(slot.length == variables[slot.variable][0] for slot in bucket.slots)
        held = sum(slot.length for slot in bucket.slots) * bucket.itemsize
        assert held <= limit or len(bucket.slots) == 1


@given(VARIABLES, LIMITS, st.booleans())
def test_buckets_are_filled_from_the_last_variable_to_the_first(
    variables: list[tuple[int, str, bool]], limit: int, cut: bool
) -> None:
    for dtype in SIZES:
        order = [
            (-slot.variable, -slot.start)
            for bucket in packed(variables, limit, cut)
            if bucket.dtype == dtype
            for slot in bucket.slots
        ]
        assert order == sorted(order)


@given(VARIABLES, LIMITS, st.booleans())
def test_a_bucket_holds_one_group_only(
    variables: list[tuple[int, str, bool]], limit: int, cut: bool
) -> None:
    groups = np.cumsum([end for _, _, end in variables])
    for bucket in packed(variables, limit, cut, grouped=True):
        assert len({groups[slot.variable] for slot in bucket.slots}) == 1


@given(VARIABLES)
def test_variables_start_where_tensorflow_reads_without_a_copy(
    variables: list[tuple[int, str, bool]],
) -> None:
    dtypes = [dtype for _, dtype, _ in variables]
    sizes = [SIZES[dtype] for dtype in dtypes]
    starts = aligned_starts([length for length, _, _ in variables], dtypes, sizes)
    assert all(start * size % ALIGN == 0 for start, size in zip(starts, sizes, strict=True))
