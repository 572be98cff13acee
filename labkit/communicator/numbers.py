"""Dtypes whose values can be summed or averaged; 16-bit floats are rounded only once."""

from __future__ import annotations

from typing import Any

import numpy as np

from labkit.common.errors import InvalidInput


def validate_summable(dtype: np.dtype[Any], mean: bool = False) -> None:
    """Raise an error if values of this dtype cannot be summed (with `mean`: averaged).

    Raises:
        InvalidInput: Values of this dtype cannot be summed or averaged; the message names allowed
            dtypes and a conversion.
    """
    if is_float(dtype) or (dtype.kind in "iu" and not mean):
        return
    floats = "float16, bfloat16, float32, float64"
    if mean:
        allowed, advice = f"averaged; allowed: {floats}", "give buffer.astype(np.float64)"
    else:
        allowed = f"summed; allowed: {floats} and integers"
        advice = (
            "to combine flags, sum buffer.astype(np.int32): the sum is above 0 where any "
            "rank has set the flag"
        )
    raise InvalidInput(f"a buffer of dtype {dtype.name} cannot be {allowed}; {advice}")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a float type, including bfloat16, unlike NumPy's own test."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def is_16_bit_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is a 16-bit float type, whose values are added in float32."""
    return dtype.itemsize == 2 and is_float(dtype)


def scale(buffer: np.ndarray, share: float) -> None:
    """Multiply floats in place; for 16-bit floats, the factor is not rounded to 16 bits.

    Args:
        buffer: The array of floats to multiply.
        share: The factor, such as a rank's share of the total weight.
    """
    if is_16_bit_float(buffer.dtype):
        np.multiply(buffer, np.float32(share), out=buffer, dtype=np.float32, casting="unsafe")
    else:
        buffer *= buffer.dtype.type(share)
