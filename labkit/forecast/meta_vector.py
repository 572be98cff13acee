"""Vectors without values: what a program does with them costs nothing, but they weigh the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class MetaVector(NDArrayOperatorsMixin):
    """Stands for a flat array of which only length and type count.

        (weights - rate * gradient)[2:5].nbytes      as if all were there

    Whatever NumPy makes of it is hollow, too; a single number of it is 1, a sum over it 0, and
    where an array must be, one of zeros.

    Args:
        size: elements.
        dtype: of each.
    """

    ndim = 1

    def __init__(self, size: int, dtype: Any = np.float32) -> None:
        self.size = size
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """As an array has."""
        return self.size * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def shape(self) -> tuple[int]:
        """Elements."""
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MetaVector(len(range(*index.indices(self.size))), self.dtype)
        return self.dtype.type(1)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Nothing is kept."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype or self.dtype), self.shape)

    def copy(self) -> MetaVector:
        """Another one alike."""
        return MetaVector(self.size, self.dtype)

    def reshape(self, *shape: Any) -> MetaVector:
        """It stays flat."""
        return self

    def astype(self, dtype: Any, copy: bool = True) -> MetaVector:
        """As many of another type."""
        return MetaVector(self.size, dtype)

    def any(self) -> bool:
        """It is not nothing."""
        return self.size > 0

    def sum(self) -> float:
        """Of no values."""
        return 0.0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **options: Any) -> Any:
        if method != "__call__":
            return 0.0
        if out := options.get("out"):
            return out[0]
        return MetaVector(max(np.size(each) for each in given), self.dtype)

    def __array_function__(
        self, what: Callable[..., Any], types: Any, given: Sequence[Any], options: Any
    ) -> Any:
        if what is np.concatenate:
            return MetaVector(sum(len(each) for each in given[0]), self.dtype)
        if what is np.append:
            return MetaVector(self.size + np.size(given[1]), self.dtype)
        if what in (np.empty_like, np.zeros_like):
            shape = options.get("shape")
            return MetaVector(
                self.size if shape is None else prod(np.atleast_1d(shape)), self.dtype
            )
        if what in (np.size, np.shape):
            return self.size if what is np.size else self.shape
        if what in (np.sum, np.linalg.norm):
            return 0.0
        return NotImplemented
