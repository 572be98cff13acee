"""Vectors with a size and without values, for forecasts of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin


class MetaVector(NDArrayOperatorsMixin):
    """A substitute for a flat NumPy array, which has a length and a dtype but no values.

        (weights - rate * gradient)[2:5].nbytes      as for a real array

    NumPy functions of a `MetaVector` also return vectors without values. Each element of a
    `MetaVector` has the value 1 when it is read. Each sum of a `MetaVector` is 0. NumPy converts a
    `MetaVector` to an array of zeros.

    Args:
        size: Number of elements.
        dtype: Dtype of the elements.
    """

    ndim = 1

    def __init__(self, size: int, dtype: Any = np.float32) -> None:
        self.size = size
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        """The bytes that a real array of this size and dtype would have."""
        return self.size * self.itemsize

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return int(self.dtype.itemsize)

    @property
    def shape(self) -> tuple[int]:
        """The shape of the vector: a tuple with the number of elements."""
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return MetaVector(len(range(*index.indices(self.size))), self.dtype)
        return self.dtype.type(1)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Do nothing: no values are stored."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.broadcast_to(np.zeros((), dtype or self.dtype), self.shape)

    def copy(self) -> MetaVector:
        """Return a vector of the same size and dtype."""
        return MetaVector(self.size, self.dtype)

    def reshape(self, *shape: Any) -> MetaVector:
        """Return the vector itself, because it is always flat."""
        return self

    def astype(self, dtype: Any, copy: bool = True) -> MetaVector:
        """Return a vector of the same size with another dtype."""
        return MetaVector(self.size, dtype)

    def any(self) -> bool:
        """Return whether the vector has elements."""
        return self.size > 0

    def sum(self) -> float:
        """Return 0, because elements have no values."""
        return 0.0

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__":
            return 0.0
        if out := options.get("out"):
            return out[0]
        return MetaVector(max(np.size(value) for value in inputs), self.dtype)

    def __array_function__(
        self, function: Callable[..., Any], types: Any, arguments: Sequence[Any], options: Any
    ) -> Any:
        if function is np.concatenate:
            return MetaVector(sum(len(part) for part in arguments[0]), self.dtype)
        if function is np.append:
            return MetaVector(self.size + np.size(arguments[1]), self.dtype)
        if function in (np.empty_like, np.zeros_like):
            shape = options.get("shape")
            return MetaVector(
                self.size if shape is None else prod(np.atleast_1d(shape)), self.dtype
            )
        if function in (np.size, np.shape):
            return self.size if function is np.size else self.shape
        if function in (np.sum, np.linalg.norm):
            return 0.0
        return NotImplemented
