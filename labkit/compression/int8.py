"""Eight bits an element and a scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from labkit.compression.blocks import greatest, scaled
from labkit.compression.compressor import Compressor, Reduced, Reduction, State
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import lowered

if TYPE_CHECKING:
    import tensorflow as tf

NAN = -128.0  # the code of what is not a number; a maximum may have passed over it


class Int8(Compressor):
    r"""Whole numbers from -127 to 127 and the greatest size, 1 byte an element.

    \(q = \mathrm{round}(127\, g / m)\), \(m = \max |g|\), \(\hat g = q\, m / 127\);
    \(|\hat g - g| \le m / 254\): rounded to the nearest, so that what is lost is not zero in
    expectation; `ErrorFeedback` sends it later.

    Args:
        block: consecutive elements that share a scale; None: the whole bucket.
        channels: a scale for each output channel of each layer (the last axis of its weights)
            instead; layers then go by themselves.

    Source: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016, arXiv
    1511.04561. Differs from it: linear, symmetric steps instead of its dynamic tree; what ranks
    send is averaged in full precision, not rounded again on the way.
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
                f"Int8(block={self.block}, channels=True): a scale belongs to a block or to a "
                "channel; give one of both"
            )
        return self

    @property
    def by_layer(self) -> bool:
        """Works on each layer's tensor in its own shape."""
        return self.channels

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Mean over the ranks, in the tensor's shape."""
        import tensorflow as tf

        mean, sent, state = yield from super().reduce(tensor, state)
        if self.channels:
            mean, sent = tf.reshape(mean, tensor.shape), tf.reshape(sent, tensor.shape)
        return Reduced(mean, sent, state)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Numbers "codes", int8 (n,), and "scales" (blocks,), in the tensor's precision."""
        import tensorflow as tf

        if self.channels and len(tensor.shape) > 1:
            return self._by_channel(tensor)
        tensor = tf.reshape(tensor, [-1])
        scales = lowered(greatest(tensor, self.block))
        steps = tf.math.divide_no_nan(tf.constant(127, tensor.dtype), scales)
        steps = tf.where(tf.math.is_finite(steps), steps, 0)  # of a block all but zero: zero
        return {"codes": _codes(scaled(tensor, steps, self.block)), "scales": scales}

    def decode(self, payload: Payload) -> Tensor:
        """Numbers times scales, (n,)."""
        import tensorflow as tf

        scales = payload["scales"]
        if self.channels:
            codes = tf.reshape(_values(payload["codes"], scales.dtype), [-1, tf.size(scales)])
            return tf.reshape(codes * (scales / 127), [-1])
        return scaled(_values(payload["codes"], scales.dtype), scales / 127, self.block)

    def _by_channel(self, tensor: Tensor) -> Payload:
        import tensorflow as tf

        rows = tf.reshape(tensor, [-1, tensor.shape[-1]])  # (inputs, channels)
        scales = lowered(tf.reduce_max(tf.abs(rows), 0))
        steps = tf.math.divide_no_nan(tf.constant(127, tensor.dtype), scales)
        steps = tf.where(tf.math.is_finite(steps), steps, 0)
        return {"codes": tf.reshape(_codes(rows * steps), [-1]), "scales": scales}


def _codes(values: Tensor) -> Tensor:
    """Values from -127 to 127, rounded, int8."""
    import tensorflow as tf

    return tf.cast(
        tf.where(tf.math.is_nan(values), tf.cast(NAN, values.dtype), tf.round(values)), tf.int8
    )


def _values(codes: Tensor, dtype: tf.DType) -> Tensor:
    """What the codes stand for."""
    import tensorflow as tf

    values = tf.cast(codes, dtype)
    return tf.where(values == NAN, tf.cast(np.nan, dtype), values)
