"""Where the means of variables are read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.communicator import alone
from labkit.exchange.arena import Arena, Packing
from labkit.exchange.bucket import pack
from labkit.schedules import boundaries


@pytest.mark.heavy
@pytest.mark.parametrize("cut", [True, False])
def test_a_variable_is_read_where_its_gradients_were_written(cut: bool) -> None:
    lengths, kinds = [3, 5, 2], [np.dtype("float32"), np.dtype("float64"), np.dtype("float32")]
    names, sizes = [kind.name for kind in kinds], [kind.itemsize for kind in kinds]
    buckets = pack(lengths, names, sizes, 8, cut)
    process = alone()
    arena = Arena(process, lengths, kinds, buckets, common=False)
    for bucket in buckets:
        for slot in bucket.slots:
            arena.piece(bucket, slot)[:] = range(slot.start, slot.stop)
    assert [each.tolist() for each in arena.means] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]
    process.close()


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    limit=st.integers(4, 200),
    size=st.integers(2, 5),
    rank=st.integers(0, 4),
)
def test_each_element_is_packed_once_kept_or_lent(
    lengths: list[int], limit: int, size: int, rank: int
) -> None:
    rank %= size
    arrays = [100.0 * number + np.arange(length) for number, length in enumerate(lengths)]
    for bucket in pack(lengths, ["float64"] * len(lengths), [8] * len(lengths), limit, cut=True):
        edges = boundaries(bucket.length, size)
        own, following = (
            slice(*edges[each : each + 2].tolist()) for each in (rank, (rank + 1) % size)
        )
        memory, common = (np.full(bucket.length, np.nan) for _ in range(2))
        held = [arrays[slot.variable] for slot in bucket.slots]
        kept = Packing(bucket, memory, own, (following, common))(held, counts=True) or []
        found = memory.copy()
        for offset, values in kept:
            assert own.start <= offset < offset + len(values) <= own.stop
            assert np.isnan(found[offset : offset + len(values)]).all()
            found[offset : offset + len(values)] = values
        lent = ~np.isnan(common)
        assert not lent[: following.start].any()
        assert not lent[following.stop :].any()
        assert np.isnan(found[lent]).all()
        found[lent] = common[lent]
        wanted = np.full(bucket.length, np.nan)
        for slot in bucket.slots:
            first = slot.offset - bucket.start
            part = arrays[slot.variable][slot.start : slot.stop]
            wanted[first : first + slot.length] = part
        np.testing.assert_array_equal(found, wanted)
