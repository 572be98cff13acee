"""Blocks of a flat tensor that share a scale, and random rounding to a few levels of it."""

from __future__ import annotations

from labkit.compression.payload import Tensor
from labkit.compression.random_bits import uniform


def split(tensor: Tensor, size: int | None) -> list[Tensor]:
    """A flat tensor (n,) as rows: whole blocks (n // size, size) and what remains, (1, n % size).

    Args:
        tensor: (n,).
        size: elements of a block; None: one block.
    """
    import tensorflow as tf

    n = tensor.shape[0]
    if size is None:
        return [tensor[None]]
    whole = n // size
    rows = tf.reshape(tensor[: whole * size], [whole, size])
    # Padding the whole tensor instead would be one more pass over it.
    return [rows, tensor[None, whole * size :]] if n % size else [rows]


def greatest(tensor: Tensor, size: int | None) -> Tensor:
    """The greatest size of an element of each block, not negative, (ceil(n / size),) or (1,)."""
    import tensorflow as tf

    if size is None:  # both sides of a flat tensor take one pass; sizes would be written first
        most = tf.maximum(tf.reduce_max(tensor), -tf.reduce_min(tensor))[None]
    else:
        most = tf.concat([tf.reduce_max(tf.abs(rows), 1) for rows in split(tensor, size)], 0)
    return tf.maximum(most, 0)  # of no elements it would be -infinity


def scaled(values: Tensor, scales: Tensor, size: int | None) -> Tensor:
    """Each block of values times its scale, (n,).

    Args:
        values: (n,); n may be unknown until it runs.
        scales: (ceil(n / size),), or (1,) for one block.
        size: elements of a block; None: one block.
    """
    import tensorflow as tf

    if size is None:
        return values * scales
    # Asked while it runs: how many values a sparse payload has differs from step to step.
    whole = tf.size(values) // size
    rows = tf.reshape(values[: whole * size], [whole, size]) * scales[:whole, None]
    return tf.concat([tf.reshape(rows, [-1]), values[whole * size :] * scales[whole:]], 0)


def to_levels(tensor: Tensor, unit: Tensor, most: int, key: Tensor) -> Tensor:
    r"""Signed levels at random, so that the expectation of level · unit is the tensor.

    \(\ell = \mathrm{sign}(v) \lfloor |v| / \mathrm{unit} + u \rfloor\), u uniform in [0, 1).

    Args:
        tensor: (n,), each at most `most` units in size.
        unit: (n,) or (1,), not negative; where it is 0, so is the level.
        most: the greatest level.
        key: int32 (2,), of random choices.

    Returns:
        most + level, from 0 to 2 · most, uint8 (n,).
    """
    import tensorflow as tf

    chance = tf.cast(uniform(tensor.shape[0], key), tensor.dtype)
    size = tf.math.divide_no_nan(tf.abs(tensor), unit) + chance
    level = tf.minimum(tf.floor(size), most)  # rounding may have lifted the greatest
    return tf.cast(most + tf.where(tensor < 0, -level, level), tf.uint8)
