"""TernGrad: each element is randomly rounded to zero or to plus or minus the maximum."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from labkit.compression.bits import pack, unpack
from labkit.compression.blocks import max_magnitudes, to_levels
from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor

NAN = np.uint8(3)  # the code of NaN


class TernGrad(Compressor):
    r"""Each element is rounded randomly to one of three values, in 2 bits.

    \(\hat g_i = s\, \mathrm{sign}(g_i)\, b_i\) with \(s = \max |g|\), where \(b_i\) is 1 with
    probability \(|g_i| / s\) and 0 if not. Then \(E\,\hat g = g\) and \(E \|\hat g - g\|^2 = s
    \|g\|_1 - \|g\|^2\). Clipping elements to `clip` standard deviations reduces the scale s, but
    makes the decoded tensor biased.

    Args:
        clip: The number of standard deviations to which elements are clipped, 2.5 in the paper;
            None: elements are not clipped.

    Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, TernGrad, 2017, arXiv 1705.07878.
    Differs from it: one scale s per bucket, not per layer; each rank uses the scale s of its own
    gradient, not the maximum over all ranks.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Wen 2017, arXiv 1705.07878"
    expansive: ClassVar[bool] = True
    xla: ClassVar[bool] = True

    clip: float | None = Field(None, gt=0)

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of the decoded tensor is the gradient; clipping prevents this."""
        return self.clip is None

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return packed "codes", uint8, "scale" (1,), and "length", int32 (1,)."""
        import tensorflow as tf

        scale, nan = max_magnitudes(tensor, None), tf.math.is_nan(tensor)
        # An empty tensor is excluded, because it has no standard deviation.
        if self.clip is not None and tensor.shape[0]:
            # Elements are divided by the maximum, because the squares of undivided elements may
            # overflow or underflow.
            deviation = tf.math.reduce_std(tf.math.divide_no_nan(tensor, scale))
            scale = tf.where(self.clip * deviation < 1, self.clip * deviation * scale, scale)
            tensor = tf.clip_by_value(tensor, -scale, scale)
        # NaN has a separate code, because the maximum may ignore NaN.
        codes = tf.where(nan, NAN, to_levels(tensor, scale, 1, key))
        return {"codes": pack(codes, 2), "scale": scale, "length": tf.constant(list(tensor.shape))}

    def decode(self, payload: Payload) -> Tensor:
        """Return the decoded elements (n,): each is -s, 0 or s, where s is the scale."""
        import tensorflow as tf

        scale = payload["scale"]

        def value(code: Tensor) -> Tensor:
            return tf.where(code < NAN, (tf.cast(code, scale.dtype) - 1) * scale, np.nan)

        return unpack(payload["codes"], 2, payload["length"][0], value)
