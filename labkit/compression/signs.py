"""Compressors that keep the sign of each value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from labkit.compression.compressor import Compressor, Payload, Tensor
from labkit.compression.numbers import finite_products, pack, split_ranges, unpack


class OneBit(Compressor):
    r"""Sends the mean of the positive elements, the mean of the others, and 1 bit per element.

    A positive element is decoded as the mean of the positive elements: \(\hat g_i =
    \mathrm{mean}\{g_j : g_j > 0\}\). Any other element is decoded as \(\hat g_i =
    \mathrm{mean}\{g_j : g_j \le 0\}\). No other pair of values has a smaller squared error for the
    given signs. The method of Seide et al. 2014 is `ErrorFeedback(OneBit())`; without error
    feedback, training may not converge.

    Source: F. Seide, H. Fu, J. Droppo, G. Li, D. Yu, 1-Bit Stochastic Gradient Descent and its
    Application to Data-Parallel Distributed Training of Speech DNNs, Interspeech 2014. Difference
    from the paper: labkit computes one pair of means per bucket, not per column of a weight matrix;
        the mean over the ranks is not quantized again.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Seide 2014, Interspeech"
    xla: ClassVar[bool] = True

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return packed "signs", uint8, "means" (2,) (positive mean last), and "length" (1,)."""
        import tensorflow as tf

        signs = pack(tf.cast(tensor > 0, tf.uint8), 1)
        # Positive elements are counted in the packed bytes, because there are 8 times fewer bytes
        # than elements.
        ones = tf.reduce_sum(tf.cast(tf.raw_ops.PopulationCount(x=signs), tf.int32))
        counts = tf.stack([tensor.shape[0] - ones, ones])
        # Elements are divided by `unit`, a power of two, so that sums of finite elements cannot
        # overflow.
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
        """Return, for each element, the mean of all elements with the same sign, (n,)."""
        import tensorflow as tf

        below, above = tf.unstack(payload["means"], 2)

        def value(sign: Tensor) -> Tensor:
            return tf.where(sign > 0, above, below)

        return unpack(payload["signs"], 1, payload["length"][0], value)


class SignSGD(Compressor):
    r"""Sends the sign of each element, and decodes the sign of the majority of ranks.

    \(\bar g_i = \mathrm{scale} \cdot \mathrm{sign} \sum_r \mathrm{sign}(g_{r,i})\), summed over all
    ranks r; a tie gives 0. Zero elements also vote: plus on every second rank, and minus on all
    other ranks. In the next step, each zero element votes with the opposite sign. Alternating votes
    prevent a drift of weights without a gradient. A rank does not vote if its whole tensor is zero.

    Args:
        scale: The magnitude of every element of the update; choose the learning rate accordingly.

    Source: J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, signSGD, 2018, arXiv
    1802.04434. J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar, signSGD with Majority Vote
    is Communication Efficient and Fault Tolerant, 2019, arXiv 1810.05291. Difference from the
    papers: each rank counts the votes of all ranks, without a server. The optimizer applies
    momentum (Signum) after the vote, not before the vote.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Bernstein 2018, arXiv 1802.04434"
    votes: ClassVar[bool] = True
    xla: ClassVar[bool] = True

    scale: float = Field(1.0, gt=0)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the packed signs of the elements, the weight of the vote, and the tensor's length.

        "signs" is an array of type uint8. "voice" is the weight of this rank's vote, and "length"
        is the number of elements. The vote of an ordinary tensor has the weight 1. The vote of a
        tensor of zeros has the weight 0. The vote of a tensor with an infinite or NaN element has
        the weight NaN.
        """
        import tensorflow as tf

        one = tf.ones([], tensor.dtype)
        # The sign of zero alternates from step to step, and differs between neighbouring ranks.
        zero_is_plus = tf.reduce_sum(key) % 2 == 0
        plus = (tensor > 0) | ((tensor == 0) & zero_is_plus)
        total = tf.reduce_sum(tf.add_n([tf.abs(part) for part in split_ranges(tensor, 8)]))
        voice = tf.cond(
            tf.math.is_finite(total),
            lambda: tf.cast(total > 0, tensor.dtype),
            # Elements are tested one by one, because a sum of finite elements may overflow.
            lambda: tf.where(tf.reduce_all(tf.math.is_finite(tensor)), one, np.nan),
        )
        return {
            "signs": pack(tf.cast(plus, tf.uint8), 1),
            "voice": voice[None],
            "length": tf.constant(list(tensor.shape)),
        }

    def decode(self, payload: Payload) -> Tensor:
        """Return one rank's votes (n,): +scale or -scale per element, times its weight "voice"."""
        import tensorflow as tf

        size = self.scale * payload["voice"][0]

        def value(sign: Tensor) -> Tensor:
            return tf.where(sign > 0, size, -size)

        return unpack(payload["signs"], 1, payload["length"][0], value)

    def average(self, payloads: Sequence[Payload]) -> Tensor:
        """Return the majority's sign of each element, multiplied by the scale."""
        import tensorflow as tf

        # The expression mean · (number of payloads) / scale counts the votes for each element. The
        # vote count is the number of plus votes less the number of minus votes.
        mean = super().average(payloads)
        # Rounding removes floating-point errors, because vote counts are whole numbers.
        votes = tf.round(mean * (len(payloads) / self.scale))
        return self.scale * tf.sign(votes)
