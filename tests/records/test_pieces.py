"""Test the state of a training in pieces: however a tensor is cut, it is restored unchanged."""

from __future__ import annotations

import json
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.common.errors import LabkitError
from labkit.records.tensor_boxes import (
    CheckpointState,
    RankFile,
    TensorBox,
    assemble,
    rank_file,
    write,
)


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Draw boxes that cover each element of a tensor once."""
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [[slice(a, b) for a, b in pairwise(own)] for own in edges]
    boxes: list[tuple[slice, ...]] = [()]
    for own in spans:
        boxes = [(*box, span) for box in boxes for span in own]
    return boxes


def pieces_of(tensor: np.ndarray, boxes: list[tuple[slice, ...]]) -> list[TensorBox]:
    return [
        TensorBox("w", tensor[box], tensor.shape, tuple(span.start for span in box))
        for box in boxes
    ]


@given(st.data())
def test_what_was_cut_one_way_is_taken_up_cut_another_way(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    tensor = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    pieces = pieces_of(tensor, data.draw(cuts(shape)))
    for box in data.draw(cuts(shape)):
        corner = tuple(span.start for span in box)
        found = assemble(data.draw(st.permutations(pieces)), corner, tensor[box].shape)
        np.testing.assert_array_equal(found, tensor[box])


def test_a_part_that_is_missing_is_no_zero() -> None:
    tensor = np.ones((4, 3), np.float32)
    pieces = pieces_of(tensor, [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(0, 2))])
    with pytest.raises(LabkitError, match="w is incomplete"):
        assemble(pieces, (0, 0), (4, 3))
    np.testing.assert_array_equal(assemble(pieces, (0, 0), (2, 3)), tensor[:2])


def test_files_of_ranks_say_together_what_there_was(tmp_path: Path) -> None:
    import ml_dtypes

    tensor = np.arange(12.0).reshape(4, 3)
    small = np.arange(3).astype(ml_dtypes.bfloat16)
    scalar = np.array(7, np.int64)
    for rank, rows in enumerate((slice(0, 1), slice(1, 4))):
        own = [
            TensorBox("w", tensor[rows], (4, 3), (rows.start, 0)),
            TensorBox.local("half", small),
        ]
        write(
            rank_file(tmp_path, rank),
            [*own, TensorBox.local("count", scalar + rank)],
            {"rank": rank},
        )
    state = CheckpointState.from_folder(tmp_path, 2)
    np.testing.assert_array_equal(state.full_tensor("w"), tensor)
    assert state.full_tensor("v") is None
    for rank, read in state.ranks.items():
        assert read.record == {"rank": rank}
        own = read.local_tensors()
        assert own["count"] == 7 + rank
        assert own["half"].dtype == small.dtype
        assert own["half"].tobytes() == small.tobytes()


def test_a_file_that_is_damaged_or_unpacks_to_more_is_refused_by_name(tmp_path: Path) -> None:
    path = rank_file(tmp_path, 0)
    words = np.frombuffer(b'{"pieces": [], "told": {}}', np.uint8)
    for content in (b"", b"PK\3\4", pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(LabkitError, match=r"rank0\.npz is damaged or was changed"):
            RankFile(path)
    for arrays in ({}, {"index": words[:9]}, {"index": words[::-1]}, {"index": np.array([None])}):
        np.savez(path, **arrays)
        with pytest.raises(LabkitError, match=r"rank0\.npz is damaged or was changed"):
            RankFile(path)
    np.savez_compressed(path, index=words)
    with pytest.raises(LabkitError, match=r"rank0\.npz is damaged .*compressed arrays"):
        RankFile(path)


def test_whatever_bytes_of_a_file_are_forged_it_is_read_or_refused(tmp_path: Path) -> None:
    path, draw, refusals = rank_file(tmp_path, 0), random.Random(0), 0
    write(path, [TensorBox("w", np.arange(6.0), (6,), (0,), True)], {})
    content = path.read_bytes()
    for _ in range(500):
        forged = bytearray(content)
        for _ in range(draw.randint(1, 4)):
            forged[draw.randrange(len(forged))] = draw.randrange(256)
        path.write_bytes(forged)
        try:
            RankFile(path).local_tensors()
        except LabkitError:
            refusals += 1
    assert refusals > 300


@pytest.mark.parametrize("kind", ["O", "V4,O", "no type", 7])
def test_a_piece_of_an_odd_type_is_refused(kind: Any, tmp_path: Path) -> None:
    index = {"pieces": [["w", [1], [0], True, kind]], "told": {}}
    words = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez(rank_file(tmp_path, 0), **{"0": np.zeros(1, "V8"), "index": words})
    with pytest.raises(LabkitError, match="is damaged or was changed"):
        RankFile(rank_file(tmp_path, 0)).local_tensors()
