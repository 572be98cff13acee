"""Half precision on the wire."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor


class Float16(Compressor):
    r"""IEEE half precision, 2 bytes an element, summed on the way.

    \(\hat g = \mathrm{fp16}(g)\), \(|\hat g - g| \le 2^{-11} |g|\) for
    \(6.1 \cdot 10^{-5} \le |g| \le 65504\); less is rounded to a multiple of \(6 \cdot 10^{-8}\),
    more is infinite. What is decoded is float32, whatever was encoded. A sum that passes 65504
    on the way is infinite, too.

    Source: P. Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740. Differs from
    it: here only the wire has half precision; how the model computes is the policy's concern.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Micikevicius 2018, arXiv 1710.03740"
    linear: ClassVar[bool] = True
    rounding: ClassVar[float] = 2.0**-11

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Values in half precision, float16 (n,)."""
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.float16)}

    def decode(self, payload: Payload) -> Tensor:
        """The values as float32 (n,)."""
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)
