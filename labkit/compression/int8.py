"""8-bit quantization: an integer per element and a scale per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from labkit.compression.blocks import max_magnitudes, scale_blocks
from labkit.compression.compressor import Compressor, Reduced, Reduction, State
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import finite_products

if TYPE_CHECKING:
    import tensorflow as tf

NAN = -128.0  # NaN has a separate code, because the maximum may ignore NaN


class Int8(Compressor):
    r"""1 byte per element: integers from -127 to 127, scaled by the maximal magnitude of a block.

    \(q = \mathrm{round}(127\, g / m)\) and \(\hat g = q\, m / 127\), where \(m = \max |g|\), so
    that \(|\hat g - g| \le m / 254\). Rounding to nearest is biased; with `ErrorFeedback`, the
    rounding error is added to the next gradient.

    Args:
        block: The number of consecutive elements that share a scale; None: the whole bucket.
        channels: Whether each output channel of a layer (the last axis of the layer's weights) has
            a separate scale. With `channels`, each layer is compressed separately.

    Source: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016, arXiv
    1511.04561. Differs from it: linear, symmetric steps instead of the paper's dynamic tree; the
    decoded tensors of the ranks are averaged in full precision, without a second rounding.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Dettmers 2016, arXiv 1511.04561"
    xla: ClassVar[bool] = True

    block: int | None = Field(None, ge=1)
    channels: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.channels and self.block is not None:
            raise ValueError(
                f"Int8(block={self.block}, channels=True): a scale factor applies either to a "
                "block or to a channel; give only one of block and channels"
            )
        return self

    @property
    def by_layer(self) -> bool:
        """Whether the compressor processes each layer's tensor in its own shape."""
        return self.channels

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean over the ranks, in the shape of the tensor."""
        import tensorflow as tf

        mean, sent, state = yield from super().reduce(tensor, state)
        if self.channels:
            mean, sent = tf.reshape(mean, tensor.shape), tf.reshape(sent, tensor.shape)
        return Reduced(mean, sent, state)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return "codes", int8 (n,), and "scales", (blocks,), in the precision of the tensor."""
        import tensorflow as tf

        if self.channels and len(tensor.shape) > 1:
            return self._by_channel(tensor)
        tensor = tf.reshape(tensor, [-1])
        scales = finite_products(max_magnitudes(tensor, self.block))
        steps = tf.math.divide_no_nan(tf.constant(127, tensor.dtype), scales)
        # A block of very small values is encoded as zeros.
        steps = tf.where(tf.math.is_finite(steps), steps, 0)
        return {"codes": _codes(scale_blocks(tensor, steps, self.block)), "scales": scales}

    def decode(self, payload: Payload) -> Tensor:
        """Return the codes multiplied by their scales, (n,)."""
        import tensorflow as tf

        scales = payload["scales"]
        if self.channels:
            codes = tf.reshape(_values(payload["codes"], scales.dtype), [-1, tf.size(scales)])
            return tf.reshape(codes * (scales / 127), [-1])
        return scale_blocks(_values(payload["codes"], scales.dtype), scales / 127, self.block)

    def _by_channel(self, tensor: Tensor) -> Payload:
        import tensorflow as tf

        rows = tf.reshape(tensor, [-1, tensor.shape[-1]])  # (inputs, channels)
        scales = finite_products(tf.reduce_max(tf.abs(rows), 0))
        steps = tf.math.divide_no_nan(tf.constant(127, tensor.dtype), scales)
        steps = tf.where(tf.math.is_finite(steps), steps, 0)
        return {"codes": tf.reshape(_codes(rows * steps), [-1]), "scales": scales}


def _codes(values: Tensor) -> Tensor:
    """Round values from -127 to 127 to int8 codes; NaN becomes the code -128."""
    import tensorflow as tf

    return tf.cast(
        tf.where(tf.math.is_nan(values), tf.cast(NAN, values.dtype), tf.round(values)), tf.int8
    )


def _values(codes: Tensor, dtype: tf.DType) -> Tensor:
    """Return the codes as floating-point values, before scaling."""
    import tensorflow as tf

    values = tf.cast(codes, dtype)
    return tf.where(values == NAN, tf.cast(np.nan, dtype), values)
