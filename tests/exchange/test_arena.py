"""Test that the mean of a variable is read where its gradients were written."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.communicator import single_rank
from labkit.exchange.bucket_layout import FlatBuffers, pack


@pytest.mark.heavy
@pytest.mark.parametrize("cut", [True, False])
def test_a_variable_is_read_where_its_gradients_were_written(cut: bool) -> None:
    lengths, kinds = [3, 5, 2], [np.dtype("float32"), np.dtype("float64"), np.dtype("float32")]
    names, sizes = [kind.name for kind in kinds], [kind.itemsize for kind in kinds]
    buckets = pack(lengths, names, sizes, 8, cut)
    process = single_rank()
    arena = FlatBuffers(process, lengths, kinds, buckets, common=False)
    for bucket in buckets:
        for slot in bucket.slots:
            arena.slot_gradients(bucket, slot)[:] = range(slot.start, slot.stop)
    assert [mean.tolist() for mean in arena.means] == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1]]
    process.close()
