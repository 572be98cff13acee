"""Test placing weights on servers by TensorFlow's rules or in slices, with no loss or repeat."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.programs import PLACEMENTS, placed

SHAPES = st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=8)


@given(SHAPES, st.integers(1, 6), st.sampled_from(sorted(PLACEMENTS)))
def test_each_weight_has_one_server(
    shapes: list[tuple[int, ...]], servers: int, placement: str
) -> None:
    size = sum(int(np.prod(shape)) for shape in shapes)
    flat = np.arange(1.0, size + 1)
    parts = placed(shapes, servers, placement)
    assert len(parts) == servers
    taken = [part.take(flat) for part in parts]
    assert sorted(np.concatenate(taken).tolist()) == flat.tolist()
    whole = np.zeros_like(flat)
    for part, values in zip(parts, taken, strict=True):
        assert len(values) == part.size
        part.put(values, whole)
    assert whole.tolist() == flat.tolist()


@given(SHAPES, st.integers(1, 6))
def test_stretches_are_as_equal_as_can_be(shapes: list[tuple[int, ...]], servers: int) -> None:
    sizes = [part.size for part in placed(shapes, servers, "sharded")]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("placement", "tensors"),
    [("round_robin", [[0, 2, 4], [1, 3]]), ("greedy", [[0, 4], [1, 2, 3]])],
)
def test_tensors_go_where_tensorflow_puts_them(placement: str, tensors: list[list[int]]) -> None:
    # The tensors have 6, 1, 2, 4 and 3 elements; greedy placement chooses the server with the
    # fewest so far.
    shapes = [(6,), (1,), (2,), (4,), (3,)]
    found = placed(shapes, 2, placement)
    assert [[piece.tensor for piece in part.pieces] for part in found] == tensors
    assert all(piece.shape for part in found for piece in part.pieces)
