"""Magnitudes of elements and norms of rows, without overflow and underflow."""

from __future__ import annotations

import numpy as np

from labkit.compression.payload import Tensor


def magnitude_bits(tensor: Tensor) -> Tensor:
    """Return integers, in the tensor's shape, that are ordered like the elements' magnitudes.

    Each integer consists of the bits of an element without its sign bit. NaN is mapped to the
    largest integers, so that comparisons select NaN.
    """
    import tensorflow as tf

    return tf.bitcast(tf.abs(tensor), tf.int64 if tensor.dtype == tf.float64 else tf.int32)


def from_bits(numbers: Tensor) -> Tensor:
    """Return the magnitudes that have these integers as bits (inverse of `magnitude_bits`)."""
    import tensorflow as tf

    return tf.bitcast(numbers, tf.float64 if numbers.dtype == tf.int64 else tf.float32)


def row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row of a (k, n) tensor; 0 only if all elements are zero.

    The norm of finite elements is always finite: instead of an overflow, it becomes the largest
    float.
    """
    import tensorflow as tf

    limits = np.finfo(rows.dtype.as_numpy_dtype)
    norms = tf.math.reduce_euclidean_norm(rows, axis=1)
    if not rows.shape[1]:
        return norms
    # Below the norm `smallest`, squares underflow; an infinite norm means that squares overflowed.
    smallest = (rows.shape[1] * limits.tiny / limits.eps) ** 0.5
    inexact = (norms < smallest) | tf.math.is_inf(norms)

    def recompute() -> Tensor:
        places = tf.where(inexact)
        return tf.tensor_scatter_nd_update(norms, places, _scaled_norms(tf.gather_nd(rows, places)))

    return tf.cond(tf.reduce_any(inexact), recompute, lambda: norms)


def _scaled_norms(rows: Tensor) -> Tensor:
    import tensorflow as tf

    largest = tf.reduce_max(tf.abs(rows), 1)
    scaled = tf.math.divide_no_nan(rows, largest[:, None])
    return finite_products(largest, tf.math.reduce_euclidean_norm(scaled, axis=1))


def finite_products(scales: Tensor, factors: Tensor | float = 1.0) -> Tensor:
    """Multiply scales by factors; limit the result so that decoded elements stay finite.

    Products are not limited if the scale is infinite or NaN.
    """
    import tensorflow as tf

    limits = np.finfo(scales.dtype.as_numpy_dtype)
    limit = limits.max * (1 - 4 * limits.eps)  # two roundings
    products = scales * factors
    return tf.where(
        (products > limit) & tf.math.is_finite(scales), tf.cast(limit, products.dtype), products
    )
