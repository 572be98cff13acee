"""Test that arrays are cached by key and complete, and that the least recently used go first."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import numpy as np

from labkit.worker.reference import ArrayCache

ARRAYS = [np.arange(6.0).reshape(2, 3), np.float32(3), np.zeros(0)]


def test_what_is_put_is_taken_in_its_order_shape_and_dtype(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path, 10**6)
    assert cache.load("one") is None
    cache.store("one", [*ARRAYS] * 5)
    found = cache.load("one")
    assert found is not None
    for ours, theirs in zip(found, [*ARRAYS] * 5, strict=True):
        assert ours.dtype == np.asarray(theirs).dtype
        np.testing.assert_array_equal(ours, theirs)


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    big = [np.zeros(1000)]  # 8,000 bytes and a header
    cache = ArrayCache(tmp_path, 20_000)
    for age, key in ((100, "one"), (50, "two")):
        cache.store(key, big)
        then = os.stat(tmp_path / f"{key}.npz").st_mtime - age
        os.utime(tmp_path / f"{key}.npz", (then, then))
    assert cache.load("one") is not None  # used now
    cache.store("three", big)
    assert cache.load("two") is None
    assert cache.load("one") is not None
    assert cache.load("three") is not None
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 20_000


def test_what_is_larger_than_the_shelf_pushes_nothing_out(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path, 10_000)
    cache.store("small", ARRAYS)
    cache.store("large", [np.zeros(10_000)])
    assert cache.load("large") is None
    assert cache.load("small") is not None


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    cache = ArrayCache(tmp_path, 10_000)
    objects = io.BytesIO()
    np.savez(objects, np.array([Path()]))
    for content in (b"", b"PK\3\4", pickle.dumps(ARRAYS), objects.getvalue()):
        (tmp_path / "key.npz").write_bytes(content)
        assert cache.load("key") is None
    cache.store("key", ARRAYS)
    assert cache.load("key") is not None
