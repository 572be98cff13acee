"""A sign an element, and what the signs stand for."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.bits import pack, stretches, unpack
from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import lowered


class OneBit(Compressor):
    r"""1 bit an element: the mean of all that are positive, or the mean of all others.

    \(\hat g_i = \mathrm{mean}\{g_j : g_j > 0\}\) where \(g_i > 0\), else
    \(\mathrm{mean}\{g_j : g_j \le 0\}\): of all pairs of values the one with the least squared
    error. The paper's method is `ErrorFeedback(OneBit())`; without feedback it may not converge.

    Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, 1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014. Differs
    from it: one pair of means for a bucket, not one for each column of a weight matrix; the mean
    of the ranks is not quantized again.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Seide 2014, Interspeech"
    xla: ClassVar[bool] = True

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Packed "signs", uint8, "means" (2,) of others and positive ones, "length", int32 (1,)."""
        import tensorflow as tf

        signs = pack(tf.cast(tensor > 0, tf.uint8), 1)
        # Counted in the packed bytes, of which there are 8 times fewer.
        ones = tf.reduce_sum(tf.cast(tf.raw_ops.PopulationCount(x=signs), tf.int32))
        counts = tf.stack([tensor.shape[0] - ones, ones])
        # In a unit in which no sum of finite elements overflows.
        unit = 2.0 ** tensor.shape[0].bit_length()
        # Stretches are added up as vectors first, which is faster than one sum over all.
        parts = stretches(tensor / unit, 8)
        below = tf.reduce_sum(tf.add_n([tf.minimum(part, 0) for part in parts]))
        above = tf.reduce_sum(tf.add_n([tf.maximum(part, 0) for part in parts]))
        shares = tf.cast(counts, tensor.dtype) / unit
        means = lowered(tf.math.divide_no_nan(tf.stack([below, above]), shares))
        return {"signs": signs, "means": means, "length": tf.constant(list(tensor.shape))}

    def decode(self, payload: Payload) -> Tensor:
        """One of both means, (n,)."""
        import tensorflow as tf

        below, above = tf.unstack(payload["means"], 2)

        def value(sign: Tensor) -> Tensor:
            return tf.where(sign > 0, above, below)

        return unpack(payload["signs"], 1, payload["length"][0], value)
