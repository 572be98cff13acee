"""Norms, bits and random bits of tensors.

Functions that pack integer codes of 1 to 8 bits into bytes.

The codes are divided into several equal ranges. A byte contains one code from each range.
Operations on whole vectors can therefore pack the codes. Example: the positions of 20 signs (1 bit
each) in 3 bytes, with 4 bits of padding (-):

    byte 0    bits 0 … 7 =  0  3  6  9 12 15 18  -
    byte 1                  1  4  7 10 13 16 19  -
    byte 2                  2  5  8 11 14 17  -  -

The low 2 bits of each 3-bit code are packed first. The third bits of all 3-bit codes follow in
later bytes. Likewise, codes of 5, 6 or 7 bits are split into parts of 4, 2 and 1 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from labkit.compression.compressor import Tensor


def magnitude_bits(tensor: Tensor) -> Tensor:
    """Return, for each element, an integer; the integers are ordered like the magnitudes.

    Each integer consists of the bits of an element without its sign bit. NaN is mapped to the
    largest integers, so that comparisons select NaN.
    """
    import tensorflow as tf

    return tf.bitcast(tf.abs(tensor), tf.int64 if tensor.dtype == tf.float64 else tf.int32)


def from_bits(numbers: Tensor) -> Tensor:
    """Return the magnitudes whose bits are `numbers`: the inverse of `magnitude_bits`."""
    import tensorflow as tf

    return tf.bitcast(numbers, tf.float64 if numbers.dtype == tf.int64 else tf.float32)


def row_norms(rows: Tensor) -> Tensor:
    """Return the 2-norm of each row of a (k, n) tensor; 0 only if all elements are zero.

    Finite elements always have a finite norm: a norm that would overflow becomes the largest float.
    """
    import tensorflow as tf

    limits = np.finfo(rows.dtype.as_numpy_dtype)
    norms = tf.math.reduce_euclidean_norm(rows, axis=1)
    if not rows.shape[1]:
        return norms
    # If the norm of a row is below `smallest`, some squares may have underflowed. If the norm of a
    # row is infinite, the squares may have overflowed.
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
    """Multiply scales by factors, up to a limit that keeps decoded elements finite.

    Products are not limited if the scale is infinite or NaN.
    """
    import tensorflow as tf

    limits = np.finfo(scales.dtype.as_numpy_dtype)
    limit = limits.max * (1 - 4 * limits.eps)  # two roundings
    products = scales * factors
    return tf.where(
        (products > limit) & tf.math.is_finite(scales), tf.cast(limit, products.dtype), products
    )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return the codes packed into n · bits / 8 bytes, plus at most 3 bytes of padding.

    Args:
        codes: The codes, uint8 (n,), each less than 2 ** bits.
        bits: The width of a code, from 1 to 8.
    """
    import tensorflow as tf

    pieces = []
    for width, first in _widths(bits):
        fields = split_ranges(_shifted(codes, -first, width), 8 // width)
        piece = fields[0]
        for index, field in enumerate(fields[1:], 1):
            piece = tf.bitwise.bitwise_or(piece, _shifted(field, index * width, 8))
        pieces.append(piece)
    return tf.concat(pieces, 0)


def unpack(packed: Tensor, bits: int, length: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """Unpack codes from bytes, and return the value of each code.

    Args:
        packed: The bytes from `pack`.
        bits: The width of a code in bits, the same as in `pack`.
        length: The number of codes, int32 ().
        value: Function that maps an array of codes to their values, element by element. `value` is
            called for each range of codes separately. One XLA call on the concatenated ranges takes
            five times as long.
    """
    import tensorflow as tf

    codes: Tensor = None
    for width, first in _widths(bits):
        per_byte = 8 // width
        m = -(-length // per_byte)
        counts = [tf.clip_by_value(length - index * m, 0, m) for index in range(per_byte)]
        fields = [_shifted(packed[:n], -i * width, width) for i, n in enumerate(counts)]
        # A code of 1, 2, 4 or 8 bits is decoded range by range. The decoder of separate ranges
        # needs no vector of all codes.
        if width == bits:
            return tf.concat([value(field) for field in fields], 0)
        part = _shifted(tf.concat(fields, 0), first, 8)
        codes = part if codes is None else tf.bitwise.bitwise_or(codes, part)
        packed = packed[m:]
    return value(codes)


def split_ranges(tensor: Tensor, count: int) -> list[Tensor]:
    """Split a flat tensor (n,) into `count` equal ranges; pad the last range with zeros."""
    import tensorflow as tf

    n = tensor.shape[0]
    m = -(-n // count)
    ranges = [tensor[min(index * m, n) : (index + 1) * m] for index in range(count)]
    return [
        part if (missing := m - part.shape[0]) == 0 else tf.pad(part, [[0, missing]])
        for part in ranges
    ]


def _widths(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the width and the first bit of each part of a code."""
    first = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, first
            first += width


def _shifted(codes: Tensor, left: int, width: int) -> Tensor:
    """Shift codes left by `left` bits (right if negative), and return their lowest `width` bits."""
    import tensorflow as tf

    if left:
        shift = tf.bitwise.left_shift if left > 0 else tf.bitwise.right_shift
        codes = shift(codes, tf.constant(abs(left), tf.uint8))
    if width < 8:
        codes = tf.bitwise.bitwise_and(codes, tf.constant(2**width - 1, tf.uint8))
    return codes


# The constant `GAMMA` is an odd number near 2**32 divided by the golden ratio. Multiplication by
# the constant `GAMMA` moves neighbouring indices far apart.
GAMMA = 0x9E3779B9
# The hash function multiplies by the factors in `ROUNDS`. If one bit of the input changes, about
# half of the bits of the hash change.
ROUNDS = (0x7FEB352D, 0x846CA68B)


def uniform(length: int, key: Tensor) -> Tensor:
    r"""Return random numbers, uniform in [0, 1); different keys give different numbers.

    The generator is counter-based: number i is the upper 23 bits of \(h_b(h_a(i \cdot \gamma))\),
    divided by \(2^{23}\). The factor γ is the constant `GAMMA`. Each hash h adds one half of the
    key to its input. Each hash h then shifts, and multiplies modulo \(2^{32}\). Each random number
    needs three 32-bit products. XLA generates each random number in the loop that uses the number.
    The random numbers are good enough for rounding, but not for cryptography.

    Args:
        length: The number of random numbers.
        key: The key of the generator, int32 (2,).

    Returns:
        The random numbers, float32 (length,), each a multiple of 2⁻²³.

    Source: J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, Parallel Random Numbers: As Easy as
    1, 2, 3, 2011. Difference from the paper: the paper's generators are statistically stronger, but
    need more rounds.
    """
    import tensorflow as tf

    first, second = tf.unstack(tf.bitcast(key, tf.uint32))
    # The key is hashed, because keys are small numbers, and similar keys must produce unrelated
    # random numbers.
    half, other = _hash(first + _hash(second + GAMMA)), _hash(second + _hash(first))
    number = tf.bitcast(tf.range(length, dtype=tf.int32), tf.uint32) * GAMMA + half
    number = _round(number, ROUNDS[0]) + other
    number = _round(number, ROUNDS[1])
    # The upper bits of the hash become the mantissa of a float in [1, 2). Bit operations on the
    # mantissa are faster than int-to-float conversion.
    mantissa = tf.bitwise.right_shift(number, tf.constant(9, tf.uint32))
    one = tf.constant(0x3F800000, tf.uint32)
    return tf.bitcast(tf.bitwise.bitwise_or(mantissa, one), tf.float32) - 1.0


def _hash(word: Tensor) -> Tensor:
    """Return a hash whose bits each depend on all bits of the 32-bit word."""
    for factor in ROUNDS:
        word = _round(word, factor)
    return word


def _round(word: Tensor, factor: int) -> Tensor:
    """Mix the bits of a 32-bit word by a shift, a product and a second shift."""
    import tensorflow as tf

    half = tf.constant(16, tf.uint32)
    word = tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half)) * factor
    return tf.bitwise.bitwise_xor(word, tf.bitwise.right_shift(word, half - 1))
