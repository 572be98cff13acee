"""1-bit SGD sends the sign of each element, and the mean value for each sign."""

from __future__ import annotations

from typing import ClassVar

from labkit.compression.bits import pack, split_ranges, unpack
from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import finite_products


class OneBit(Compressor):
    r"""Sends two means, of positive and of other elements; 1 bit per element selects one of them.

    \(\hat g_i = \mathrm{mean}\{g_j : g_j > 0\}\) if \(g_i > 0\), and \(\mathrm{mean}\{g_j : g_j \le
    0\}\) if \(g_i \le 0\). No other two values have a smaller squared error for these signs. The
    paper's method is `ErrorFeedback(OneBit())`; without error feedback, training may not converge.

    Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, 1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014. Differs from
    it: labkit computes one pair of means per bucket, not per column of a weight matrix; the mean
        over the ranks is not quantized again.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Seide 2014, Interspeech"
    xla: ClassVar[bool] = True

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return "signs" (packed, uint8), "means" (2,), non-positive first, and "length" (1,)."""
        import tensorflow as tf

        signs = pack(tf.cast(tensor > 0, tf.uint8), 1)
        # Positive elements are counted in the packed bytes, because there are 8 times fewer bytes
        # than elements.
        ones = tf.reduce_sum(tf.cast(tf.raw_ops.PopulationCount(x=signs), tf.int32))
        counts = tf.stack([tensor.shape[0] - ones, ones])
        # Elements are divided by `unit`, so that sums of finite elements cannot overflow.
        unit = 2.0 ** tensor.shape[0].bit_length()
        # Eight ranges are first added as vectors, which is faster than a single sum over all
        # elements.
        parts = split_ranges(tensor / unit, 8)
        below = tf.reduce_sum(tf.add_n([tf.minimum(part, 0) for part in parts]))
        above = tf.reduce_sum(tf.add_n([tf.maximum(part, 0) for part in parts]))
        shares = tf.cast(counts, tensor.dtype) / unit
        means = finite_products(tf.math.divide_no_nan(tf.stack([below, above]), shares))
        return {"signs": signs, "means": means, "length": tf.constant(list(tensor.shape))}

    def decode(self, payload: Payload) -> Tensor:
        """Return, for each element, the mean of all elements of its sign, (n,)."""
        import tensorflow as tf

        below, above = tf.unstack(payload["means"], 2)

        def value(sign: Tensor) -> Tensor:
            return tf.where(sign > 0, above, below)

        return unpack(payload["signs"], 1, payload["length"][0], value)
