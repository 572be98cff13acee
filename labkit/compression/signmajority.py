"""Signs that vote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from labkit.compression.bits import pack, stretches, unpack
from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor


class SignMajority(Compressor):
    r"""1 bit an element; what most ranks say is applied.

    \(\bar g_i = \mathrm{scale} \cdot \mathrm{sign} \sum_r \mathrm{sign}(g_{r,i})\); a tie gives 0.
    A zero has to vote, too: plus on every second rank, minus on the others, the other way round
    in the next step, so that weights without gradient do not drift. A rank whose tensor is zero
    throughout abstains.

    Args:
        scale: size of every element of what is applied; the learning rate has to fit it.

    Source: J. Bernstein, Y.-X. Wang, K. Azizzadenesheli, A. Anandkumar, signSGD, 2018, arXiv
    1802.04434; J. Bernstein, J. Zhao, K. Azizzadenesheli, A. Anandkumar, signSGD with Majority
    Vote is Communication Efficient and Fault Tolerant, 2019, arXiv 1810.05291. Differs from
    them: each rank counts the votes of all, no server does; momentum (Signum) is the
    optimizer's, after the vote, not before it.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Bernstein 2018, arXiv 1802.04434"
    votes: ClassVar[bool] = True
    xla: ClassVar[bool] = True

    scale: float = Field(1.0, gt=0)

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Packed "signs", uint8, "voice" (1,) and "length", int32 (1,).

        The voice is 1, 0 of a tensor of zeros, and NaN where an element is infinite or NaN.
        """
        import tensorflow as tf

        one = tf.ones([], tensor.dtype)
        zero_is_plus = tf.reduce_sum(key) % 2 == 0  # keys count ranks and steps
        plus = (tensor > 0) | ((tensor == 0) & zero_is_plus)
        total = tf.reduce_sum(tf.add_n([tf.abs(part) for part in stretches(tensor, 8)]))
        voice = tf.cond(
            tf.math.is_finite(total),
            lambda: tf.cast(total > 0, tensor.dtype),
            # The sum of finite elements may be infinite.
            lambda: tf.where(tf.reduce_all(tf.math.is_finite(tensor)), one, np.nan),
        )
        return {
            "signs": pack(tf.cast(plus, tf.uint8), 1),
            "voice": voice[None],
            "length": tf.constant(list(tensor.shape)),
        }

    def decode(self, payload: Payload) -> Tensor:
        """Plus or minus the scale, (n,)."""
        import tensorflow as tf

        size = self.scale * payload["voice"][0]

        def value(sign: Tensor) -> Tensor:
            return tf.where(sign > 0, size, -size)

        return unpack(payload["signs"], 1, payload["length"][0], value)

    def average(self, payloads: Sequence[Payload]) -> Tensor:
        """The majority's sign, times the scale."""
        import tensorflow as tf

        # Their mean is in units of the scale; times their number it counts votes.
        mean = super().average(payloads)
        votes = tf.round(mean * (len(payloads) / self.scale))  # whole again
        return self.scale * tf.sign(votes)
