"""Test gathered payloads and sums of sparse vectors on real ranks, with every algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit.cluster import Cluster
from labkit.communicator import ALGORITHMS
from labkit.communicator.sparse import SparseSum, SparseVector, cut_sparse


def gather_and_sum(communicator: Any, algorithms: list[str]) -> list[Any]:
    rng = np.random.default_rng(communicator.rank)
    found: list[Any] = []
    for algorithm in algorithms:
        data = np.arange(3 + 5 * communicator.rank, dtype=np.uint8)  # the length differs by rank
        empty = data[: communicator.rank % 2]
        gathered = [communicator.gather_bytes(each, algorithm) for each in (data, empty)]
        dense = np.zeros(50, np.float32)
        places = np.flatnonzero(rng.random(50) < 0.1 * (1 + 2 * communicator.rank)).astype("<i4")
        dense[places] = rng.integers(-8, 8, len(places))
        total = communicator.sparse_sum(places, dense[places], len(dense), algorithm)
        exact = np.sum(communicator.allgather(dense), axis=0)
        found.append((gathered, total.tolist(), exact.tolist()))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_algorithm_gathers_and_adds_up(cluster: Cluster, ranks: int) -> None:
    for found in cluster.call(gather_and_sum, list(ALGORITHMS), ranks=ranks):
        for algorithm, ((full, empty), total, exact) in zip(ALGORITHMS, found, strict=True):
            assert [len(data) for data in full] == [3 + 5 * r for r in range(ranks)], algorithm
            assert all(data.tolist() == list(range(len(data))) for data in full), algorithm
            assert [len(data) for data in empty] == [r % 2 for r in range(ranks)], algorithm
            assert total == exact, algorithm


def meter(communicator: Any) -> list[int]:
    before = communicator.traffic.copy()
    communicator.gather_bytes(np.zeros(1000, np.uint8), "ring")
    gathered = communicator.traffic.since(before)
    before = communicator.traffic.copy()
    places = np.arange(0, 4000, 100, dtype="<i4")
    communicator.sparse_sum(places, np.ones(len(places), np.float32), 4000, "butterfly")
    summed = communicator.traffic.since(before)
    return [gathered.payload_bytes, gathered.wire_bytes, summed.payload_bytes, summed.wire_bytes]


def test_bytes_are_those_of_the_pieces_on_their_way(cluster: Cluster) -> None:
    ranks = 4
    table = 12  # the header of each payload: a count, a rank and a length
    sparse = 40 * 8
    for told in cluster.call(meter, ranks=ranks):
        payload, wire, sparse_payload, sparse_wire = told
        assert (payload, wire) == (1000, (ranks - 1) * (1000 + table))
        assert sparse_payload == sparse
        assert sparse_wire == 2 * (sparse + 4)  # two rounds; equal indices add no entries


def test_a_part_turns_dense_where_that_is_cheaper() -> None:
    whole = SparseSum([0, 10], np.dtype(np.float32))
    one = SparseVector(10, np.array([1, 5], "<i4"), np.ones(2, np.float32))
    other = SparseVector(10, np.array([5, 7, 8], "<i4"), np.ones(3, np.float32))
    sparse = whole.add([one, one])
    assert sparse.indices is not None
    assert sparse.values.tolist() == [2, 2]
    switched = whole.add(
        [one, other, SparseVector(10, np.array([0], "<i4"), np.ones(1, np.float32))]
    )
    assert switched.indices is None  # 5 entries of 8 bytes are not smaller than 10 of 4 bytes
    assert switched.values.tolist() == [1, 1, 0, 0, 0, 2, 0, 1, 1, 0]
    assert whole.from_bytes(whole.to_bytes([switched]), 0, 1)[0].values.tolist() == (
        switched.values.tolist()
    )


def test_a_vector_is_cut_at_the_edges_of_its_chunks() -> None:
    parts = cut_sparse(np.array([0, 5, 99], "<i4"), np.array([1.0, 2.0, 3.0]), [0, 5, 100])
    assert [part.length for part in parts] == [5, 95]
    assert [part.dense().sum() for part in parts] == [1.0, 5.0]
    assert parts[1].indices is not None
    assert parts[1].indices.tolist() == [0, 94]
