"""BFloat16: the upper half of a float32, with 8 bits of exponent and 7 of mantissa."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor


class BFloat16(Compressor):
    r"""The upper half of each float32, 2 bytes per element; an allreduce sums these values.

    \(\hat g = \mathrm{bf16}(g)\), with \(|\hat g - g| \le 2^{-8} |g|\) up to \(3.39 \cdot
    10^{38}\), which is also the limit of float32; larger values become infinite. Sums in the
    allreduce also have a precision of only 8 bits. The decoded tensor is float32, also for float64
    input.

    Source: D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv
    1905.12322. Differs from it: unlike in the paper, only messages and their sums have bfloat16
    precision; the dtype policy determines the model's precision.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Kalamkar 2019, arXiv 1905.12322"
    linear: ClassVar[bool] = True
    rounding: ClassVar[float] = 2.0**-8

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the values rounded to bfloat16, an array of shape (n,)."""
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.bfloat16)}

    def decode(self, payload: Payload) -> Tensor:
        """Return the values as float32 (n,)."""
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)
