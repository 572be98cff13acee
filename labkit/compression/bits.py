"""Functions that pack integer codes of 1 to 8 bits into bytes.

The codes are divided into several equal ranges, and a byte contains one code from each range, so
that packing works on whole vectors. Example: the positions of 20 signs (1 bit each) in 3 bytes,
with 4 bits of padding (-):

    byte 0    bits 0 … 7 =  0  3  6  9 12 15 18  -
    byte 1                  1  4  7 10 13 16 19  -
    byte 2                  2  5  8 11 14 17  -  -

The low 2 bits of a 3-bit code are packed first; its third bit is packed in later bytes. Codes with
other widths that are not a power of two are split in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labkit.compression.payload import Tensor


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
    """Return the values of the codes that the bytes contain, an array of shape (length,).

    Args:
        packed: The bytes from `pack`.
        bits: The width of a code in bits, the same as in `pack`.
        length: The number of codes, int32 ().
        value: Function from codes to values, element by element. The function is called for each
            range separately, because one call on the concatenated ranges takes XLA five times as
            long.
    """
    import tensorflow as tf

    codes: Tensor = None
    for width, first in _widths(bits):
        per_byte = 8 // width
        m = -(-length // per_byte)
        counts = [tf.clip_by_value(length - index * m, 0, m) for index in range(per_byte)]
        fields = [_shifted(packed[:n], -i * width, width) for i, n in enumerate(counts)]
        # If a code is not split into several widths, values are decoded range by range, without a
        # vector of all codes.
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
    """Yield bit widths (1, 2, 4 or 8) that sum to `bits`, and the first bit of each in the code."""
    first = 0
    # The widest part of a code is packed first, because `unpack` reads the parts in this order.
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, first
            first += width


def _shifted(codes: Tensor, left: int, width: int) -> Tensor:
    """Return the lowest `width` bits of codes after a left shift (right if `left` is negative)."""
    import tensorflow as tf

    if left:
        shift = tf.bitwise.left_shift if left > 0 else tf.bitwise.right_shift
        codes = shift(codes, tf.constant(abs(left), tf.uint8))
    if width < 8:
        codes = tf.bitwise.bitwise_and(codes, tf.constant(2**width - 1, tf.uint8))
    return codes
