"""Arrays are kept by their key, whole, and the oldest go when there is no more room."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np

from labkit.worker.array_cache import ArrayCache

ARRAYS = [np.arange(6.0).reshape(2, 3), np.float32(3), np.zeros(0)]


def test_what_is_put_is_taken_in_its_order_shape_and_dtype(tmp_path: Path) -> None:
    shelf = ArrayCache(tmp_path, 10**6)
    assert shelf.take("one") is None
    shelf.put("one", [*ARRAYS] * 5)
    found = shelf.take("one")
    assert found is not None
    for ours, theirs in zip(found, [*ARRAYS] * 5, strict=True):
        assert ours.dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    big = [np.zeros(1000)]  # 8,000 bytes and a head
    shelf = ArrayCache(tmp_path, 20_000)
    for age, key in ((100, "one"), (50, "two")):
        shelf.put(key, big)
        then = os.stat(tmp_path / f"{key}.npz").st_mtime - age
        os.utime(tmp_path / f"{key}.npz", (then, then))
    assert shelf.take("one") is not None  # used now
    shelf.put("three", big)
    assert shelf.take("two") is None
    assert shelf.take("one") is not None
    assert shelf.take("three") is not None
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000


def test_what_is_larger_than_the_shelf_pushes_nothing_out(tmp_path: Path) -> None:
    shelf = ArrayCache(tmp_path, 10_000)
    shelf.put("small", ARRAYS)
    shelf.put("large", [np.zeros(10_000)])
    assert shelf.take("large") is None
    assert shelf.take("small") is not None


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    shelf = ArrayCache(tmp_path, 10_000)
    objects = io.BytesIO()
    np.savez(objects, np.array([Path()]))
    for content in (b"", b"PK\3\4", pickle.dumps(ARRAYS), objects.getvalue()):
        (tmp_path / "key.npz").write_bytes(content)
        assert shelf.take("key") is None
    shelf.put("key", ARRAYS)
    assert shelf.take("key") is not None
