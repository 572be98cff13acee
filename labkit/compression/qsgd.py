"""QSGD: elements are rounded randomly to levels between zero and the norm of their bucket."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.bits import pack, unpack
from labkit.compression.blocks import scale_blocks, split, to_levels
from labkit.compression.compressor import Compressor, run_fused
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import row_norms


class QSGD(Compressor):
    r"""Sends one norm per bucket, and for each element a sign and one of s random levels.

    \(\hat g_i = \|g\|\, \mathrm{sign}(g_i)\, \xi_i / s\), where \(\xi_i\) is one of the two whole
    numbers around \(s |g_i| / \|g\|\). Then \(E\,\hat g = g\) and \(E \|\hat g - g\|^2 \le \min(d /
    s^2, \sqrt d / s) \|g\|^2\) with d elements per norm. Each element is encoded in the smallest
    whole number of bits for 2 s + 1 values, where s is the number of levels: 2, 4, 8 bits for s =
    1, 7, 127.

    Args:
        levels: The number s of levels, from 1 to 127.
        bucket: The number of elements that share a norm; larger buckets send fewer bytes, but their
            decoded values have a larger variance. With None, there is one norm for all elements.

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, QSGD, 2017, arXiv 1610.02132.
    Differs from it: codes have a fixed width instead of Elias codes; the scale is always the
    2-norm, although the paper's experiments also use the maximum.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Alistarh 2017, arXiv 1610.02132"
    unbiased: ClassVar[bool] = True

    levels: int = Field(7, ge=1, le=127, kw_only=False)
    bucket: int | None = Field(512, ge=1)

    @property
    def expansive(self) -> bool:
        """Whether the upper bound of the error's variance is at least the tensor's squared norm."""
        if self.bucket is None:
            return True
        return self.bucket >= self.levels**2

    @property
    def bits(self) -> int:
        """The number of bits per element in the payload."""
        return (2 * self.levels).bit_length()

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return packed "codes", uint8, "norms" (buckets,), and "length", int32 (1,)."""
        import tensorflow as tf

        # Norms are computed outside XLA, because XLA would add the squares one by one.
        rows = split(tensor, self.bucket)
        norms = tf.concat([row_norms(part) for part in rows], 0)
        codes = run_fused(self._codes, tensor, norms, key)
        return {"codes": codes, "norms": norms, "length": tf.constant(list(tensor.shape))}

    def _codes(self, tensor: Tensor, norms: Tensor, key: Tensor) -> Tensor:
        import tensorflow as tf

        units = scale_blocks(tf.ones_like(tensor), norms / self.levels, self.bucket)
        return pack(to_levels(tensor, units, self.levels, key), self.bits)

    def decode(self, payload: Payload) -> Tensor:
        """Return the decoded tensor (n,): signed levels multiplied by norm / s."""
        import tensorflow as tf

        norms = payload["norms"]

        def level(code: Tensor) -> Tensor:
            return tf.cast(code, norms.dtype) - self.levels

        def levels(codes: Tensor, length: Tensor) -> Tensor:
            return unpack(codes, self.bits, length, level)

        def times(levels: Tensor, norms: Tensor) -> Tensor:
            return scale_blocks(levels, norms / self.levels, self.bucket)

        decoded = run_fused(levels, payload["codes"], payload["length"][0])
        return run_fused(times, decoded, norms)
