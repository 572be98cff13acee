"""Test that a sparse file keeps every bit, and has as many bytes as the formula says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import datasets, models
from labkit.common.errors import LabkitError
from labkit.deployment import Prune, read_sparse, write_sparse
from labkit.deployment.sparse_file import PREFIX, coded_bytes, pack, unpack

pytestmark = pytest.mark.heavy  # this file builds models

DATA = datasets.load("digits", rows=64, test_rows=64)


def tensor(size: int, kept: float, dtype: str, seed: int) -> Any:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=size) * 10
    return np.where(draw.random(size) < kept, values, 0).astype(dtype)


@settings(max_examples=60)
@given(
    st.integers(0, 300),
    st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    st.sampled_from(["float32", "float64", "float16", "bfloat16", "int8"]),
    st.integers(0, 9),
)
def test_a_tensor_comes_back_bit_for_bit_in_the_smallest_coding(
    size: int, kept: float, dtype: str, seed: int
) -> None:
    import ml_dtypes  # noqa: F401  # teaches NumPy bfloat16

    before = tensor(size, kept, dtype, seed)
    record, content = pack(before)
    after = unpack(record, content)
    assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes())
    sizes = coded_bytes(size, int(np.count_nonzero(before)), before.itemsize)
    assert len(content) == sizes[record["coding"]] == min(sizes.values())


def test_each_coding_is_taken_where_it_is_the_smallest() -> None:
    # A position among 1024 needs 10 bits. For k values, the bytes are 4096 (dense), 128 + 4 k
    # (bitmap), and ceil(1.25 k) + 4 k (indices).
    assert coded_bytes(1024, 100, 4) == {"dense": 4096, "bitmap": 528, "indices": 525}
    for kept, coding in ((1024, "dense"), (500, "bitmap"), (102, "bitmap"), (101, "indices")):
        values = np.zeros(1024, np.float32)
        values[-kept:] = 1.5
        assert pack(values)[0]["coding"] == coding


def test_minus_zero_and_nan_are_kept() -> None:
    before = np.zeros((40, 5), np.float32)
    before[3, 2], before[17, 0] = -0.0, np.nan
    record, content = pack(before)
    assert record["kept"] == 2
    assert unpack(record, content).tobytes() == before.tobytes()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"widths": [32], "dropout": 0.1}),
        ("cnn", {"filters": [4], "dense": 8}),
        ("rnn", {"units": 8}),
    ],
)
def test_a_model_comes_back_equal_and_the_file_is_as_large_as_its_parts(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    pruned = Prune(sparsity=0.9).apply(models.build(name, DATA, **options), DATA).model
    path = write_sparse(pruned, tmp_path / "model.sparse")
    back = read_sparse(path)
    for before, after in zip(pruned.weights, back.weights, strict=True):
        assert before.numpy().tobytes() == after.numpy().tobytes()
    answers = pruned(DATA.x_test, training=False), back(DATA.x_test, training=False)
    assert np.array_equal(*answers)
    header = int.from_bytes(path.read_bytes()[PREFIX - 4 : PREFIX], "little")
    values = [weight.numpy() for weight in pruned.weights]
    parts = [min(coded_bytes(v.size, np.count_nonzero(v), 4).values()) for v in values]
    assert path.stat().st_size == PREFIX + header + sum(parts)
    assert sum(parts) < 0.2 * sum(v.nbytes for v in values) or math.prod(values[0].shape) < 500


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = write_sparse(models.build("linear", DATA), tmp_path / "model.sparse")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(LabkitError, match=f"has {len(content) - 1} bytes instead of"):
        read_sparse(path)
    path.write_bytes(b"PK" + content)
    with pytest.raises(LabkitError, match="is not a sparse model file"):
        read_sparse(path)
