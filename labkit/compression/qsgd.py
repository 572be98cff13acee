"""Random rounding to levels between zero and the norm."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.bits import pack, unpack
from labkit.compression.blocks import scaled, split, to_levels
from labkit.compression.compressor import Compressor, in_one_loop
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import row_norms


class QSGD(Compressor):
    r"""A norm, and for each element a sign and one of s levels, chosen at random.

    \(\hat g_i = \|g\|\, \mathrm{sign}(g_i)\, \xi_i / s\), where \(\xi_i\) is one of the two whole
    numbers around \(s |g_i| / \|g\|\), so that \(E\,\hat g = g\) and
    \(E \|\hat g - g\|^2 \le \min(d / s^2, \sqrt d / s) \|g\|^2\) with d elements a norm. An
    element takes the least whole number of bits that holds 2 s + 1 values: 2, 4, 8 for s = 1, 7,
    127.

    Args:
        levels: s, from 1 to 127.
        bucket: elements that share a norm; more of them: fewer bytes, more variance; None: all.

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, QSGD, 2017, arXiv 1610.02132.
    Differs from it: codes of a fixed width instead of Elias codes; always the 2-norm, where the
    paper's experiments scale by the maximum, too.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Alistarh 2017, arXiv 1610.02132"
    unbiased: ClassVar[bool] = True

    levels: int = Field(7, ge=1, le=127, kw_only=False)
    bucket: int | None = Field(512, ge=1)

    @property
    def expansive(self) -> bool:
        """Whether the bound of the variance, relative to the square of the norm, is 1 or more."""
        if self.bucket is None:
            return True
        return self.bucket >= self.levels**2

    @property
    def bits(self) -> int:
        """Bits that an element takes on the wire."""
        return (2 * self.levels).bit_length()

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Packed "codes", uint8, "norms" (buckets,), and "length", int32 (1,)."""
        import tensorflow as tf

        # Not by XLA: it adds up one number after the other.
        rows = split(tensor, self.bucket)
        norms = tf.concat([row_norms(each) for each in rows], 0)
        codes = in_one_loop(self._codes, tensor, norms, key)
        return {"codes": codes, "norms": norms, "length": tf.constant(list(tensor.shape))}

    def _codes(self, tensor: Tensor, norms: Tensor, key: Tensor) -> Tensor:
        import tensorflow as tf

        units = scaled(tf.ones_like(tensor), norms / self.levels, self.bucket)
        return pack(to_levels(tensor, units, self.levels, key), self.bits)

    def decode(self, payload: Payload) -> Tensor:
        """Levels times the norm's share, (n,)."""
        import tensorflow as tf

        norms = payload["norms"]

        def level(code: Tensor) -> Tensor:
            return tf.cast(code, norms.dtype) - self.levels

        def levels(codes: Tensor, length: Tensor) -> Tensor:
            return unpack(codes, self.bits, length, level)

        def times(levels: Tensor, norms: Tensor) -> Tensor:
            return scaled(levels, norms / self.levels, self.bucket)

        found = in_one_loop(levels, payload["codes"], payload["length"][0])
        return in_one_loop(times, found, norms)
