"""Codes of a few bits side by side in bytes.

A byte holds codes that lie far apart, one of each of equal stretches, so that packing works on
whole vectors. Of 20 signs (m = 3 bytes; the last 4 of 24 bits are padding):

    byte 0    bits 0 … 7 =  0  3  6  9 12 15 18  -
    byte 1                  1  4  7 10 13 16 19  -
    byte 2                  2  5  8 11 14 17  -  -

Codes of 3 bits are packed as one of 2 bits and, in the bytes behind, one of 1 bit; and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from labkit.compression.payload import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Bytes that hold these codes: n · bits / 8 of them, and at most 3 of padding.

    Args:
        codes: uint8 (n,), less than 2 ** bits.
        bits: from 1 to 8.
    """
    import tensorflow as tf

    pieces = []
    for width, first in _widths(bits):
        fields = stretches(_shifted(codes, -first, width), 8 // width)
        piece = fields[0]
        for index, field in enumerate(fields[1:], 1):
            piece = tf.bitwise.bitwise_or(piece, _shifted(field, index * width, 8))
        pieces.append(piece)
    return tf.concat(pieces, 0)


def unpack(packed: Tensor, bits: int, length: Tensor, value: Callable[[Tensor], Tensor]) -> Tensor:
    """What the codes in these bytes stand for, (length,).

    Args:
        packed: what `pack` returned.
        bits: as they were given to it.
        length: number of codes, int32 ().
        value: what codes stand for, element by element. It is called with one stretch after the
            other: behind the concatenation it would take XLA five times as long.
    """
    import tensorflow as tf

    codes: Tensor = None
    for width, first in _widths(bits):
        each = 8 // width
        m = -(-length // each)
        counts = [tf.clip_by_value(length - index * m, 0, m) for index in range(each)]
        fields = [_shifted(packed[:n], -i * width, width) for i, n in enumerate(counts)]
        # Codes of one piece are decoded stretch by stretch, without the vector of codes.
        if width == bits:
            return tf.concat([value(field) for field in fields], 0)
        part = _shifted(tf.concat(fields, 0), first, 8)
        codes = part if codes is None else tf.bitwise.bitwise_or(codes, part)
        packed = packed[m:]
    return value(codes)


def stretches(tensor: Tensor, count: int) -> list[Tensor]:
    """A flat tensor (n,) as `count` equal stretches, the last of them padded with zeros."""
    import tensorflow as tf

    n = tensor.shape[0]
    m = -(-n // count)
    cut = [tensor[min(index * m, n) : (index + 1) * m] for index in range(count)]
    return [
        each if (short := m - each.shape[0]) == 0 else tf.pad(each, [[0, short]]) for each in cut
    ]


def _widths(bits: int) -> Iterator[tuple[int, int]]:
    """Widths that divide a byte and add up to `bits`, each with the first bit of its field."""
    first = 0
    # The widest first, as `unpack` reads them.
    for width in (8, 4, 2, 1):
        if bits & width:
            yield width, first
            first += width


def _shifted(codes: Tensor, left: int, width: int) -> Tensor:
    """Codes shifted left, or right where negative, of which `width` bits are kept."""
    import tensorflow as tf

    if left:
        shift = tf.bitwise.left_shift if left > 0 else tf.bitwise.right_shift
        codes = shift(codes, tf.constant(abs(left), tf.uint8))
    if width < 8:
        codes = tf.bitwise.bitwise_and(codes, tf.constant(2**width - 1, tf.uint8))
    return codes
