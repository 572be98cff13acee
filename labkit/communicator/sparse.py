"""Sums of sparse vectors and tables; a sum is stored densely if its dense form is smaller."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.communicator.wire import is_16_bit_float

INDEX = np.dtype("<i4")


@dataclass(frozen=True)
class SparseVector:
    """A vector, or one chunk of a vector, in sparse or dense form.

    Attributes:
        length: The number of elements; each element is a number or a row of numbers.
        indices: The ascending indices of the stored elements, from 0; None: all elements are
            stored.
        values: The stored elements, an array of shape (k, …), where k is the number of stored
            elements.
    """

    length: int
    indices: np.ndarray | None
    values: np.ndarray

    def dense(self) -> np.ndarray:
        """Return all elements as a dense array, with zeros for elements that are not stored."""
        if self.indices is None:
            return self.values
        values = np.zeros((self.length, *self.values.shape[1:]), self.values.dtype)
        values[self.indices] = self.values
        return values

    def compact(self) -> SparseVector:
        r"""Return the smaller form: sparse with k indices and values, or dense with n values."""
        if self.indices is None:
            return self
        row = row_bytes(self.values)
        if len(self.indices) * (INDEX.itemsize + row) < self.length * row:
            return self
        return SparseVector(self.length, None, self.dense())


class SparseSum:
    """The addition and serialization of chunks of sparse vectors, for any allreduce schedule.

    Args:
        edges: The indices at which the chunks of the vector start and end. The array `edges` has
            the shape (chunks + 1,).
        dtype: The dtype of the values.
        row: The shape of one element; () if each element is a number.

    Source: H. Zhao, J. Canny: Sparse allreduce, 2013, arXiv 1312.3020. C. Renggli et al.: SparCML,
    2019, arXiv 1802.08021, for the switch to the dense form. Zhao & Canny and Renggli et al. send
    the sparse chunks by a fixed allreduce algorithm; labkit sends them by any allreduce schedule.
    """

    def __init__(self, edges: Sequence[int], dtype: np.dtype, row: tuple[int, ...] = ()) -> None:
        self._edges, self._dtype, self._row = list(edges), dtype, row

    def add(self, values: Sequence[SparseVector]) -> SparseVector:
        """Return the sum; all ranks add in the same order, so their sums are bitwise equal."""
        if any(value.indices is None for value in values):
            total = np.zeros((values[0].length, *self._row), self._dtype)
            for value in values:
                total[slice(None) if value.indices is None else value.indices] += value.values
            return SparseVector(len(total), None, total)
        indices = np.concatenate([v.indices for v in values if v.indices is not None])
        elements = np.concatenate([value.values for value in values])
        return SparseVector(values[0].length, *merged(indices, elements)).compact()

    def to_bytes(self, values: Sequence[SparseVector]) -> np.ndarray:
        """Serialize the index count (-1 if dense), the indices and the values of each chunk."""
        pieces: list[np.ndarray] = []
        for value in values:
            count = -1 if value.indices is None else len(value.indices)
            pieces.append(np.array([count], INDEX).view(np.uint8))
            if value.indices is not None:
                pieces.append(value.indices.view(np.uint8))
            pieces.append(value.values.reshape(-1).view(np.uint8))
        return np.concatenate(pieces)

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[SparseVector]:
        """Return the chunks in a message, which contains chunks `first` to `first + count - 1`."""
        parts: list[SparseVector] = []
        start = 0

        def read(elements: int, dtype: np.dtype) -> np.ndarray:
            nonlocal start
            begin, start = start, start + elements * dtype.itemsize
            # The bytes are copied because they may not be aligned for the dtype.
            return data[begin:start].copy().view(dtype)

        def rows(count: int) -> np.ndarray:
            return read(count * math.prod(self._row), self._dtype).reshape(count, *self._row)

        for chunk in range(first, first + count):
            index_count = int(read(1, INDEX)[0])
            length = self._edges[chunk + 1] - self._edges[chunk]
            if index_count < 0:
                parts.append(SparseVector(length, None, rows(length)))
            else:
                parts.append(SparseVector(length, read(index_count, INDEX), rows(index_count)))
        return parts


def cut_sparse(indices: np.ndarray, values: np.ndarray, edges: Sequence[int]) -> list[SparseVector]:
    """Cut a sparse vector into chunks at the given indices."""
    places = np.searchsorted(indices, edges)
    chunks = zip(edges[:-1], edges[1:], places[:-1], places[1:], strict=True)
    return [
        SparseVector(last - first, (indices[a:b] - first).astype(INDEX), values[a:b]).compact()
        for first, last, a, b in chunks
    ]


def merged(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the indices, and add the values of equal indices in their given order.

    Args:
        indices: The indices of the values, from 0, an array of shape (k,).
        values: The values, an array of shape (k, …); 16-bit floats are added in float32 and rounded
            once.

    Returns:
        indices: The distinct indices in ascending order.
        values: The sum of the values of each distinct index.
    """
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.flatnonzero(np.diff(indices, prepend=-1))
    if len(first) == len(indices):
        return indices, values
    kind = np.dtype(np.float32) if is_16_bit_float(values.dtype) else values.dtype
    total = np.add.reduceat(values, first, dtype=kind)
    return indices[first], total.astype(values.dtype, copy=False)


def join_rows(parts: Sequence[SparseVector], edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ascending indices and the values of all elements that the chunks store."""
    local_indices = [
        np.arange(p.length, dtype=INDEX) if p.indices is None else p.indices for p in parts
    ]
    indices = [
        local + INDEX.type(first) for local, first in zip(local_indices, edges, strict=False)
    ]
    return np.concatenate(indices), np.concatenate([part.values for part in parts])


def row_bytes(values: np.ndarray) -> int:
    """Return the bytes of one element of an array of values with shape (k, …)."""
    return math.prod(values.shape[1:]) * values.itemsize
