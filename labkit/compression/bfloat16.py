"""Half of a float32 on the wire: its exponent and 7 bits."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor


class BFloat16(Compressor):
    r"""The upper half of float32, 2 bytes an element, summed on the way.

    \(\hat g = \mathrm{bf16}(g)\), \(|\hat g - g| \le 2^{-8} |g|\) in the range of float32, up to
    \(3.39 \cdot 10^{38}\); more is infinite. Sums on the way keep 8 bits only. What is decoded is
    float32, whatever was encoded.

    Source: D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv
    1905.12322. Differs from it: here only the wire has this precision, sums included; how the
    model computes is the policy's concern.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Kalamkar 2019, arXiv 1905.12322"
    linear: ClassVar[bool] = True
    rounding: ClassVar[float] = 2.0**-8

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Values in 16 bits, bfloat16 (n,)."""
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.bfloat16)}

    def decode(self, payload: Payload) -> Tensor:
        """The values as float32 (n,)."""
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)
