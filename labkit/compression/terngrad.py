"""Minus, zero or plus the greatest, at random."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from labkit.compression.bits import pack, unpack
from labkit.compression.blocks import greatest, to_levels
from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor

NAN = np.uint8(3)  # the code of what is not a number


class TernGrad(Compressor):
    r"""Three values, 2 bits an element.

    \(\hat g_i = s\, \mathrm{sign}(g_i)\, b_i\), \(s = \max |g|\), \(b_i = 1\) with probability
    \(|g_i| / s\), else 0: \(E\,\hat g = g\), \(E \|\hat g - g\|^2 = s \|g\|_1 - \|g\|^2\).
    Clipping to `clip` standard deviations first makes s small, and what is sent biased.

    Args:
        clip: standard deviations to which elements are clipped, 2.5 in the paper; None: none.

    Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, TernGrad, 2017, arXiv
    1705.07878. Differs from it: one s for a bucket, not one a layer; each rank has its own s,
    not the greatest of all ranks.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Wen 2017, arXiv 1705.07878"
    expansive: ClassVar[bool] = True
    xla: ClassVar[bool] = True

    clip: float | None = Field(None, gt=0)

    @property
    def unbiased(self) -> bool:
        """Clipping loses what it cuts off."""
        return self.clip is None

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Packed "codes", uint8, "scale" (1,), and "length", int32 (1,)."""
        import tensorflow as tf

        scale, nan = greatest(tensor, None), tf.math.is_nan(tensor)
        # Nothing has no deviation.
        if self.clip is not None and tensor.shape[0]:
            # Of shares of the greatest: squares of great or small elements are no floats.
            deviation = tf.math.reduce_std(tf.math.divide_no_nan(tensor, scale))
            scale = tf.where(self.clip * deviation < 1, self.clip * deviation * scale, scale)
            tensor = tf.clip_by_value(tensor, -scale, scale)
        # A maximum may have passed over NaN, and its size is no level.
        codes = tf.where(nan, NAN, to_levels(tensor, scale, 1, key))
        return {"codes": pack(codes, 2), "scale": scale, "length": tf.constant(list(tensor.shape))}

    def decode(self, payload: Payload) -> Tensor:
        """-s, 0 or s, (n,)."""
        import tensorflow as tf

        scale = payload["scale"]

        def value(code: Tensor) -> Tensor:
            return tf.where(code < NAN, (tf.cast(code, scale.dtype) - 1) * scale, np.nan)

        return unpack(payload["codes"], 2, payload["length"][0], value)
