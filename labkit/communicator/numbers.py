"""Which values can be added and averaged, and how 16-bit floats are without being rounded twice."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput


def check_summable(dtype: np.dtype[Any], mean: bool = False) -> None:
    """Refuse what cannot be added up, or divided where a mean is wanted.

    Raises:
        InvalidInput: with the dtypes that can, and what to do with others.
    """
    if is_float(dtype) or (dtype.kind in "iu" and not mean):
        return
    known = "float16, bfloat16, float32, float64"
    if mean:
        told, advice = f"averaged; allowed: {known}", "give buffer.astype(np.float64)"
    else:
        told = f"summed; allowed: {known} and integers"
        advice = "of flags, sum buffer.astype(np.int32): above 0 where one is set"
    raise InvalidInput(f"a buffer of {dtype.name} cannot be {told}; {advice}")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether values have fractions; NumPy does not know that bfloat16's have."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether floats have 16 bits: they are added in float32, which MPI can, too."""
    return dtype.itemsize == 2 and is_float(dtype)


def scale(buffer: np.ndarray, share: float) -> None:
    """Multiply floats in place; a share of 16-bit ones is not rounded to their 8 or 11 bits."""
    if is_narrow(buffer.dtype):
        np.multiply(buffer, np.float32(share), out=buffer, dtype=np.float32, casting="unsafe")
    else:
        buffer *= buffer.dtype.type(share)
