"""Random numbers for every element of a gradient, at about the price of writing them."""

from __future__ import annotations

from labkit.compression.payload import Tensor

# An odd number near 2**32 over the golden ratio: places that are neighbours come to lie far apart.
APART = 0x9E3779B9
ROUNDS = (0x7FEB352D, 0x846CA68B)  # multipliers under which each bit flips half of the others


def uniform(length: int, key: Tensor) -> Tensor:
    r"""Numbers in [0, 1), one a place; other keys give other numbers.

    A counter-based generator: of \(h_b(h_a(i \cdot \gamma))\), where each h adds its half of the
    key, shifts, and multiplies modulo \(2^{32}\), the upper 23 bits over \(2^{23}\). It needs three
    products of 32 bits a number, and XLA writes it in one loop with what uses the numbers. Good
    enough to round with; no secret is safe with it.

    Args:
        length: how many.
        key: int32 (2,).

    Returns:
        float32 (length,), multiples of 2⁻²³.

    Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, Parallel Random Numbers: As Easy as
    1, 2, 3, 2011. Differs from it: its generators are stronger and need more rounds.
    """
    import tensorflow as tf

    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    # Mixed by themselves: keys are small numbers, and those of neighbours must not be near.
    half, other = _mixed(first + _mixed(second + APART)), _mixed(second + _mixed(first))
    number = tf.bitcast(tf.range(length, dtype=tf.int32), tf.uint32) * APART + half
    number = _turned(number, ROUNDS[0]) + other
    number = _turned(number, ROUNDS[1])
    # The upper bits as those of a float from 1 to 2: no conversion, which would take as long.
    mantissa = tf.bitwise.right_shift(number, tf.constant(9, tf.uint32))
    one = tf.constant(0x3F800000, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(mantissa, one), tf.float32) - 1.0


def _mixed(word: Tensor) -> Tensor:
    """A word of which each bit hangs on all bits of the one given."""
    for factor in ROUNDS:
        word = _turned(word, factor)
    return word


def _turned(word: Tensor, factor: int) -> Tensor:
    """Upper bits brought down, spread by a product, and brought down again."""
    import tensorflow as tf

    half = tf.constant(16, tf.uint32)
    word = tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half)) * factor
    return tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half - 1))
