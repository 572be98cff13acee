"""Float16: messages in IEEE half precision (16 bits per element)."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor


class Float16(Compressor):
    r"""IEEE half precision, 2 bytes per element; an allreduce sums these values.

    \(\hat g = \mathrm{fp16}(g)\), with \(|\hat g - g| \le 2^{-11} |g|\) for \(6.1 \cdot 10^{-5} \le
    |g| \le 65504\). Smaller values are rounded to a multiple of \(6 \cdot 10^{-8}\); larger values
    become infinite. Partial sums in the allreduce also become infinite if they exceed 65504. The
    decoded tensor is float32, also for float64 input.

    Source: P. Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740. Differs from
    it: unlike in the paper, only messages have half precision; the dtype policy determines the
        model's precision.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Micikevicius 2018, arXiv 1710.03740"
    linear: ClassVar[bool] = True
    rounding: ClassVar[float] = 2.0**-11

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the values rounded to half precision, float16 (n,)."""
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.float16)}

    def decode(self, payload: Payload) -> Tensor:
        """Return the values as float32 (n,)."""
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)
