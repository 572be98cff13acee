"""Sparse vectors, and tables of few rows, added on their way; dense where that is cheaper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.communicator.numbers import is_narrow

INDEX = np.dtype("<i4")


@dataclass(frozen=True)
class Part:
    """Some of `length` elements: those at `indices`, ascending from 0; all where it is None.

    An element is a number, or a row of numbers: values has the shape (k, …).
    """

    length: int
    indices: np.ndarray | None
    values: np.ndarray

    def dense(self) -> np.ndarray:
        """All values."""
        if self.indices is None:
            return self.values
        values = np.zeros((self.length, *self.values.shape[1:]), self.values.dtype)
        values[self.indices] = self.values
        return values

    def compact(self) -> Part:
        r"""The cheaper form: sparse while \(k (4 + b) < n b\) for k values of b bytes among n."""
        if self.indices is None:
            return self
        row = row_bytes(self.values)
        if len(self.indices) * (INDEX.itemsize + row) < self.length * row:
            return self
        return Part(self.length, None, self.dense())


class SparseSum:
    """Sums of sparse parts.

    Args:
        edges: where each chunk of the vector begins and ends, (chunks + 1,).
        dtype: of the values.
        row: the shape of an element.

    Source: H. Zhao, J. Canny: Sparse allreduce, 2013, arXiv 1312.3020; C. Renggli et al.: SparCML,
    2019, arXiv 1802.08021, for the switch. Differs from them: any schedule carries the parts.
    """

    def __init__(self, edges: Sequence[int], dtype: np.dtype, row: tuple[int, ...] = ()) -> None:
        self._edges, self._dtype, self._row = list(edges), dtype, row

    def add(self, values: Sequence[Part]) -> Part:
        """The sum in this order, to the same bits whoever adds."""
        if any(value.indices is None for value in values):
            total = np.zeros((values[0].length, *self._row), self._dtype)
            for value in values:
                total[slice(None) if value.indices is None else value.indices] += value.values
            return Part(len(total), None, total)
        indices = np.concatenate([v.indices for v in values if v.indices is not None])
        ndarray = np.concatenate([value.values for value in values])
        return Part(values[0].length, *merged(indices, ndarray)).compact()

    def to_bytes(self, values: Sequence[Part]) -> np.ndarray:
        """For each part a count (-1: dense), then indices and values."""
        pieces: list[np.ndarray] = []
        for value in values:
            count = -1 if value.indices is None else len(value.indices)
            pieces.append(np.array([count], INDEX).view(np.uint8))
            if value.indices is not None:
                pieces.append(value.indices.view(np.uint8))
            pieces.append(value.values.reshape(-1).view(np.uint8))
        return np.concatenate(pieces)

    def from_bytes(self, data: np.ndarray, first: int, count: int) -> list[Part]:
        """The parts in a message."""
        found: list[Part] = []
        start = 0

        def take(elements: int, dtype: np.dtype) -> np.ndarray:
            nonlocal start
            begin, start = start, start + elements * dtype.itemsize
            return data[begin:start].copy().view(dtype)  # aligned

        def rows(count: int) -> np.ndarray:
            return take(count * math.prod(self._row), self._dtype).reshape(count, *self._row)

        for chunk in range(first, first + count):
            held = int(take(1, INDEX)[0])
            length = self._edges[chunk + 1] - self._edges[chunk]
            if held < 0:
                found.append(Part(length, None, rows(length)))
            else:
                found.append(Part(length, take(held, INDEX), rows(held)))
        return found


def cut_sparse(indices: np.ndarray, values: np.ndarray, edges: Sequence[int]) -> list[Part]:
    """A sparse vector cut at the edges of its chunks."""
    places = np.searchsorted(indices, edges)
    chunks = zip(edges[:-1], edges[1:], places[:-1], places[1:], strict=True)
    return [
        Part(last - first, (indices[a:b] - first).astype(INDEX), values[a:b]).compact()
        for first, last, a, b in chunks
    ]


def merged(indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each index once, ascending, with the sum of its values in the order in which they come.

    Args:
        indices: (k,), from 0 on.
        values: (k, …); 16-bit floats are added in float32 and rounded once.
    """
    order = np.argsort(indices, kind="stable")
    indices, values = indices[order], values[order]
    first = np.flatnonzero(np.diff(indices, prepend=-1))
    if len(first) == len(indices):
        return indices, values
    kind = np.dtype(np.float32) if is_narrow(values.dtype) else values.dtype
    total = np.add.reduceat(values, first, dtype=kind)
    return indices[first], total.astype(values.dtype, copy=False)


def rows_of(parts: Sequence[Part], edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which elements the parts of a vector hold, ascending, and their values."""
    array1_ds = [
        np.arange(p.length, dtype=INDEX) if p.indices is None else p.indices for p in parts
    ]
    indices = [
        array1_d + INDEX.type(first) for array1_d, first in zip(array1_ds, edges, strict=False)
    ]
    return np.concatenate(indices), np.concatenate([part.values for part in parts])


def row_bytes(values: np.ndarray) -> int:
    """Bytes of one element of (k, …) values."""
    return math.prod(values.shape[1:]) * values.itemsize
