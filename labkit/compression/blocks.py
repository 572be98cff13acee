"""Blocks of a flat tensor with one scale per block, and random rounding to levels of the scale."""

from __future__ import annotations

from labkit.compression.payload import Tensor
from labkit.compression.random_bits import uniform


def split(tensor: Tensor, size: int | None) -> list[Tensor]:
    """Return a flat tensor as rows: full blocks (n // size, size), and a last row (1, n % size).

    Args:
        tensor: The flat tensor, (n,).
        size: The number of elements of a block; None: the whole tensor is one block.
    """
    import tensorflow as tf

    n = tensor.shape[0]
    if size is None:
        return [tensor[None]]
    whole = n // size
    rows = tf.reshape(tensor[: whole * size], [whole, size])
    # The last row is separate, because padding the tensor would need another pass over memory.
    return [rows, tensor[None, whole * size :]] if n % size else [rows]


def max_magnitudes(tensor: Tensor, size: int | None) -> Tensor:
    """Return each block's maximal magnitude, (ceil(n / size),) or (1,); 0 for an empty tensor."""
    import tensorflow as tf

    if size is None:  # one pass over memory, without a tensor of magnitudes
        maxima = tf.maximum(tf.reduce_max(tensor), -tf.reduce_min(tensor))[None]
    else:
        maxima = tf.concat([tf.reduce_max(tf.abs(rows), 1) for rows in split(tensor, size)], 0)
    return tf.maximum(maxima, 0)  # the maximum of no elements is -infinity


def scale_blocks(values: Tensor, scales: Tensor, size: int | None) -> Tensor:
    """Return the values of each block multiplied by the block's scale, (n,).

    Args:
        values: The values, (n,); n may be unknown when the function is compiled.
        scales: The scales of the blocks, of shape (ceil(n / size),), or (1,) for one block.
        size: The number of elements of a block; None: all values form one block.
    """
    import tensorflow as tf

    if size is None:
        return values * scales
    # The number of full blocks is computed at run time, because the length of sparse payloads
    # differs between training steps.
    whole = tf.size(values) // size
    rows = tf.reshape(values[: whole * size], [whole, size]) * scales[:whole, None]
    return tf.concat([tf.reshape(rows, [-1]), values[whole * size :] * scales[whole:]], 0)


def to_levels(tensor: Tensor, unit: Tensor, max_level: int, key: Tensor) -> Tensor:
    r"""Round randomly to signed levels, so that the expectation of level · unit is the tensor.

    The level is \(\ell = \mathrm{sign}(v) \lfloor |v| / \mathrm{unit} + u \rfloor\) for an element
    v, with u uniform in [0, 1).

    Args:
        tensor: The tensor to round, (n,), with magnitudes up to `max_level` units.
        unit: The size of one level, (n,) or (1,), not negative; elements with unit 0 have level 0.
        max_level: The largest magnitude of a level.
        key: The key of random choices, int32 (2,).

    Returns:
        The sum max_level + level for each element, from 0 to 2 · max_level, as uint8 (n,).
    """
    import tensorflow as tf

    chance = tf.cast(uniform(tensor.shape[0], key), tensor.dtype)
    size = tf.math.divide_no_nan(tf.abs(tensor), unit) + chance
    # Rounding errors can lift a level above `max_level`.
    level = tf.minimum(tf.floor(size), max_level)
    return tf.cast(max_level + tf.where(tensor < 0, -level, level), tf.uint8)
