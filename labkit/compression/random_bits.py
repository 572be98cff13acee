"""A fast counter-based random number generator, for one number per gradient element."""

from __future__ import annotations

from labkit.compression.payload import Tensor

# GAMMA is an odd number near 2**32 / golden ratio. The product with GAMMA maps neighbouring indices
# to distant numbers.
GAMMA = 0x9E3779B9
ROUNDS = (0x7FEB352D, 0x846CA68B)  # hash factors: one flipped input bit flips about half the output


def uniform(length: int, key: Tensor) -> Tensor:
    r"""Return random numbers, uniform in [0, 1); different keys give different numbers.

    The generator is counter-based: number i is the upper 23 bits of \(h_b(h_a(i \cdot \gamma))\)
    over \(2^{23}\), where γ is `GAMMA`, and each h adds one half of the key, shifts, and multiplies
    modulo \(2^{32}\). Each number needs three 32-bit products, and XLA fuses the generator and the
    use of its numbers into one loop. The random numbers are good enough for rounding, but not for
    cryptography.

    Args:
        length: The number of random numbers.
        key: The key of the generator, int32 (2,).

    Returns:
        The random numbers, float32 (length,), each a multiple of 2⁻²³.

    Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, Parallel Random Numbers: As Easy as
    1, 2, 3, 2011. Differs from it: the paper's generators are statistically stronger, but need more
    rounds.
    """
    import tensorflow as tf

    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    # The key is hashed, because keys are small numbers, and similar keys must produce unrelated
    # random numbers.
    half, other = _hash(first + _hash(second + GAMMA)), _hash(second + _hash(first))
    number = tf.bitcast(tf.range(length, dtype=tf.int32), tf.uint32) * GAMMA + half
    number = _round(number, ROUNDS[0]) + other
    number = _round(number, ROUNDS[1])
    # The upper bits become the mantissa of a float in [1, 2), which is faster than int-to-float
    # conversion.
    mantissa = tf.bitwise.right_shift(number, tf.constant(9, tf.uint32))
    one = tf.constant(0x3F800000, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(mantissa, one), tf.float32) - 1.0


def _hash(word: Tensor) -> Tensor:
    """Return a hash of a 32-bit word; each bit of the hash depends on all bits of the word."""
    for factor in ROUNDS:
        word = _round(word, factor)
    return word


def _round(word: Tensor, factor: int) -> Tensor:
    """Mix the bits of a 32-bit word by a shift, a product and a second shift."""
    import tensorflow as tf

    half = tf.constant(16, tf.uint32)
    word = tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half)) * factor
    return tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half - 1))
