"""Sizes of elements and norms of rows that are right for each float, however great or small."""

from __future__ import annotations

import numpy as np

from labkit.compression.payload import Tensor


def bits(tensor: Tensor) -> Tensor:
    """Whole numbers in the order of the elements' sizes, in the tensor's shape.

    The bits of a float without its sign. Those of NaN are the greatest, so that no comparison
    passes over it.
    """
    import tensorflow as tf

    return tf.bitcast(tf.abs(tensor), tf.int64 if tensor.dtype == tf.float64 else tf.int32)


def from_bits(numbers: Tensor) -> Tensor:
    """The sizes that these numbers stand for."""
    import tensorflow as tf

    return tf.bitcast(numbers, tf.float64 if numbers.dtype == tf.int64 else tf.float32)


def row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row (k, n): finite for finite elements, 0 for zeros only.

    A norm above the greatest float is that float.
    """
    import tensorflow as tf

    limits = np.finfo(rows.dtype.as_numpy_dtype)
    norms = tf.math.reduce_euclidean_norm(rows, axis=1)
    if not rows.shape[1]:
        return norms
    # Below this norm squares are lost; above the greatest float they are infinite.
    least = (rows.shape[1] * limits.tiny / limits.eps) ** 0.5
    odd = (norms < least) | tf.math.is_inf(norms)

    def again() -> Tensor:
        places = tf.where(odd)
        return tf.tensor_scatter_nd_update(norms, places, _scaled_norms(tf.gather_nd(rows, places)))

    return tf.cond(tf.reduce_any(odd), again, lambda: norms)


def _scaled_norms(rows: Tensor) -> Tensor:
    import tensorflow as tf

    most = tf.reduce_max(tf.abs(rows), 1)
    shares = tf.math.divide_no_nan(rows, most[:, None])
    return lowered(most, tf.math.reduce_euclidean_norm(shares, axis=1))


def lowered(scales: Tensor, factors: Tensor | float = 1.0) -> Tensor:
    """Scales times factors, of which no multiple of a share overflows: at most the greatest float.

    What is infinite or NaN before stays so.
    """
    import tensorflow as tf

    limits = np.finfo(scales.dtype.as_numpy_dtype)
    most = limits.max * (1 - 4 * limits.eps)  # a share and its multiple are rounded
    products = scales * factors
    return tf.where(
        (products > most) & tf.math.is_finite(scales), tf.cast(most, products.dtype), products
    )
