"""Compressors that store each value in fewer bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from pydantic import Field, model_validator

from labkit.compression.compressor import (
    Compressor,
    Payload,
    Reduced,
    Reduction,
    State,
    Tensor,
    run_fused,
)
from labkit.compression.numbers import finite_products, pack, row_norms, uniform, unpack

if TYPE_CHECKING:
    import tensorflow as tf


def split(tensor: Tensor, size: int | None) -> list[Tensor]:
    """Cut a flat tensor into full blocks, (n // size, size), and a remainder, (1, n % size).

    Args:
        tensor: The flat tensor, (n,).
        size: The number of elements of a block; None: the whole tensor is one block.
    """
    import tensorflow as tf

    n = tensor.shape[0]
    if size is None:
        return [tensor[None]]
    whole = n // size
    rows = tf.reshape(tensor[: whole * size], [whole, size])
    # The last, shorter row is separate, because padding the tensor would need another pass over
    # memory.
    return [rows, tensor[None, whole * size :]] if n % size else [rows]


def max_magnitudes(tensor: Tensor, size: int | None) -> Tensor:
    """Return each block's maximal magnitude, (ceil(n / size),) or (1,); 0 for an empty tensor."""
    import tensorflow as tf

    # The minimum and the maximum need only one pass over memory, and no tensor of magnitudes.
    if size is None:
        maxima = tf.maximum(tf.reduce_max(tensor), -tf.reduce_min(tensor))[None]
    else:
        maxima = tf.concat([tf.reduce_max(tf.abs(rows), 1) for rows in split(tensor, size)], 0)
    return tf.maximum(maxima, 0)  # The maximum of an empty tensor is -infinity, which becomes 0.


def scale_blocks(values: Tensor, scales: Tensor, size: int | None) -> Tensor:
    """Return the values of each block multiplied by the block's scale, (n,).

    Args:
        values: The values, (n,); n may be unknown when the function is compiled.
        scales: The scales of the blocks, of shape (ceil(n / size),), or (1,) for one block.
        size: The number of elements of a block; None: all values form one block.
    """
    import tensorflow as tf

    if size is None:
        return values * scales
    # The number of full blocks is computed at run time. The length of sparse payloads differs
    # between training steps.
    whole = tf.size(values) // size
    rows = tf.reshape(values[: whole * size], [whole, size]) * scales[:whole, None]
    return tf.concat([tf.reshape(rows, [-1]), values[whole * size :] * scales[whole:]], 0)


def to_levels(tensor: Tensor, unit: Tensor, max_level: int, key: Tensor) -> Tensor:
    r"""Round each element randomly to a multiple of a unit, without a mean error.

    To find a level, the function adds a random number u before rounding down. The random number u
    is uniform in [0, 1).

    Args:
        tensor: The tensor to round, (n,), with magnitudes up to `max_level` units.
        unit: The distance between two levels, with shape (n,) or (1,).
        max_level: The largest magnitude of a level.
        key: The key of random choices, int32 (2,).

    Returns: The level of each element, shifted so that no value is negative.
    """
    import tensorflow as tf

    chance = tf.cast(uniform(tensor.shape[0], key), tensor.dtype)
    size = tf.math.divide_no_nan(tf.abs(tensor), unit) + chance
    # Rounding errors can raise a level above `max_level`.
    level = tf.minimum(tf.floor(size), max_level)
    return tf.cast(max_level + tf.where(tensor < 0, -level, level), tf.uint8)


# NaN has a separate code, because the largest magnitude, which becomes the scale, may ignore NaN.
NAN_VALUE = -128.0


class Int8(Compressor):
    r"""Sends 1 byte per element, an integer from -127 to 127, and one scale per block.

    The integers are \(q = \mathrm{round}(127\, g / m)\), with the scale \(m = \max |g|\). The
    decoded gradient is \(\hat g = q\, m / 127\) for integers q and scale m. The error of an element
    is at most \(m / 254\) for the scale m. Rounding to nearest is biased; with `ErrorFeedback`, the
    rounding error is added to the next gradient.

    Args:
        block: The number of consecutive elements that share a scale; None: the whole bucket.
        channels: Whether each output channel of a layer has a separate scale. The output channels
            are the last axis of a layer's weights. With `channels`, each layer is compressed
            separately.

    Source: T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016, arXiv
    1511.04561. Difference from the paper: linear, symmetric steps instead of the paper's dynamic
    tree; the decoded tensors of the ranks are averaged in full precision, without a second
    rounding.
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
        # A block is encoded as zeros if its values are so small that 127 / maximum overflows.
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
        tf.where(tf.math.is_nan(values), tf.cast(NAN_VALUE, values.dtype), tf.round(values)),
        tf.int8,
    )


def _values(codes: Tensor, dtype: tf.DType) -> Tensor:
    """Return the codes as floating-point values, before scaling."""
    import tensorflow as tf

    values = tf.cast(codes, dtype)
    return tf.where(values == NAN_VALUE, tf.cast(np.nan, dtype), values)


class QSGD(Compressor):
    r"""Sends one norm per bucket, and for each element a sign and a randomly rounded level.

    For s levels, the decoded element is \(\hat g_i = \|g\|\, \mathrm{sign}(g_i)\, \xi_i / s\). The
    level \(\xi_i\) is one of the two whole numbers around \(s |g_i| / \|g\|\). The expectation is
    \(E\,\hat g = g\). With d elements per norm and s levels, the variance has an upper bound: \(E
    \|\hat g - g\|^2 \le \min(d / s^2, \sqrt d / s) \|g\|^2\). Each element is encoded as one of 2 s
    + 1 values. The width of a code depends on the number s of levels: 2, 4, 8 bits for s = 1, 7,
    127.

    Args:
        levels: The number s of levels, from 1 to 127.
        bucket: The number of elements that share a norm. Larger buckets send fewer bytes, but their
            decoded values have a larger variance. If `bucket` is None, all elements share one norm.

    Source: D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic, QSGD, 2017, arXiv 1610.02132.
    Difference from the paper: codes have a fixed width instead of Elias codes; the scale is always
    the 2-norm, although the paper's experiments also use the maximum.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Alistarh 2017, arXiv 1610.02132"
    unbiased: ClassVar[bool] = True

    levels: int = Field(7, ge=1, le=127, kw_only=False)
    bucket: int | None = Field(512, ge=1)

    @property
    def expansive(self) -> bool:
        """Whether the upper bound of the error's variance is at least the tensor's squared norm."""
        if self.bucket is None:
            return True
        return self.bucket >= self.levels**2

    @property
    def bits(self) -> int:
        """The number of bits per element in the payload."""
        return (2 * self.levels).bit_length()

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the packed codes of the elements, the norms of the buckets, and the length.

        "codes" is an array of type uint8. "norms" has shape (buckets,). "length" is an array of one
        number of type int32.
        """
        import tensorflow as tf

        # Norms are computed outside XLA, because XLA would add the squares one by one.
        rows = split(tensor, self.bucket)
        norms = tf.concat([row_norms(part) for part in rows], 0)
        codes = run_fused(self._codes, tensor, norms, key)
        return {"codes": codes, "norms": norms, "length": tf.constant(list(tensor.shape))}

    def _codes(self, tensor: Tensor, norms: Tensor, key: Tensor) -> Tensor:
        import tensorflow as tf

        units = scale_blocks(tf.ones_like(tensor), norms / self.levels, self.bucket)
        return pack(to_levels(tensor, units, self.levels, key), self.bits)

    def decode(self, payload: Payload) -> Tensor:
        """Return the decoded tensor (n,): signed levels multiplied by norm / s."""
        import tensorflow as tf

        norms = payload["norms"]

        def level(code: Tensor) -> Tensor:
            return tf.cast(code, norms.dtype) - self.levels

        def levels(codes: Tensor, length: Tensor) -> Tensor:
            return unpack(codes, self.bits, length, level)

        def times(levels: Tensor, norms: Tensor) -> Tensor:
            return scale_blocks(levels, norms / self.levels, self.bucket)

        decoded = run_fused(levels, payload["codes"], payload["length"][0])
        return run_fused(times, decoded, norms)


NAN_CODE = np.uint8(3)


class TernGrad(Compressor):
    r"""Each element is rounded randomly to one of three values, in 2 bits.

    The decoded element is \(\hat g_i = s\, \mathrm{sign}(g_i)\, b_i\), with the scale \(s = \max
    |g|\). The random bit \(b_i\) is 1 with probability \(|g_i| / s\), and otherwise 0. The decoded
    tensor \(\hat g\) is unbiased: its expectation is \(E\,\hat g = g\). For the scale s, the
    squared error is \(E \|\hat g - g\|^2 = s \|g\|_1 - \|g\|^2\). Clipping elements to `clip`
    standard deviations reduces the scale s, but makes the decoded tensor biased.

    Args:
        clip: The number of standard deviations to which elements are clipped, 2.5 in Wen et al.
            2017. If `clip` is None, elements are not clipped.

    Source: W. Wen, C. Xu, F. Yan, C. Wu, Y. Wang, Y. Chen, H. Li, TernGrad, 2017, arXiv 1705.07878.
    Difference from the paper: each rank uses its own scale for each bucket of gradients.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Wen 2017, arXiv 1705.07878"
    expansive: ClassVar[bool] = True
    xla: ClassVar[bool] = True

    clip: float | None = Field(None, gt=0)

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is an unbiased estimate of the gradient (without clipping)."""
        return self.clip is None

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the payload: packed "codes", uint8; "scale" (1,); "length", int32 (1,)."""
        import tensorflow as tf

        scale, nan = max_magnitudes(tensor, None), tf.math.is_nan(tensor)
        # An empty tensor is excluded, because it has no standard deviation.
        if self.clip is not None and tensor.shape[0]:
            # Elements are divided by the maximum, because the squares of undivided elements may
            # overflow or underflow.
            deviation = tf.math.reduce_std(tf.math.divide_no_nan(tensor, scale))
            scale = tf.where(self.clip * deviation < 1, self.clip * deviation * scale, scale)
            tensor = tf.clip_by_value(tensor, -scale, scale)
        # A separate code marks NaN, because the scale may ignore NaN.
        codes = tf.where(nan, NAN_CODE, to_levels(tensor, scale, 1, key))
        return {"codes": pack(codes, 2), "scale": scale, "length": tf.constant(list(tensor.shape))}

    def decode(self, payload: Payload) -> Tensor:
        """Return the decoded elements (n,): each is -s, 0 or s, where s is the scale."""
        import tensorflow as tf

        scale = payload["scale"]

        def value(code: Tensor) -> Tensor:
            return tf.where(code < NAN_CODE, (tf.cast(code, scale.dtype) - 1) * scale, np.nan)

        return unpack(payload["codes"], 2, payload["length"][0], value)


class Float16(Compressor):
    r"""Sends each element in IEEE half precision (2 bytes); an allreduce sums the sent values.

    \(\hat g = \mathrm{fp16}(g)\), with \(|\hat g - g| \le 2^{-11} |g|\) for \(6.1 \cdot 10^{-5} \le
    |g| \le 65504\). Smaller values are rounded to a multiple of \(6 \cdot 10^{-8}\); larger values
    become infinite. Partial sums in the allreduce also become infinite if they exceed 65504. The
    decoded tensor is float32, also for float64 input.

    Source: P. Micikevicius et al., Mixed Precision Training, 2018, arXiv 1710.03740. Difference
    from the paper: unlike in the paper, only messages have half precision; the dtype policy
        determines the model's precision.
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


class BFloat16(Compressor):
    r"""Sends the upper 2 bytes of each float32; an allreduce sums the bfloat16 values.

    Each gradient element g is rounded to bfloat16: \(\hat g = \mathrm{bf16}(g)\). The rounding
    error is at most \(2^{-8} |g|\) for magnitudes up to \(3.39 \cdot 10^{38}\). Values above this
    limit of bfloat16 become infinite. Sums in the allreduce also have a precision of only 8 bits.
    The decoded tensor is float32, also for float64 input.

    Source: D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019, arXiv
    1905.12322. Difference from the paper: unlike in the paper, only messages and their sums have
    bfloat16 precision; the dtype policy determines the model's precision.
    """

    family: ClassVar[str] = "quantization"
    paper: ClassVar[str] = "Kalamkar 2019, arXiv 1905.12322"
    linear: ClassVar[bool] = True
    rounding: ClassVar[float] = 2.0**-8

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return the values rounded to bfloat16, an array of shape (n,)."""
        import tensorflow as tf

        return {"values": tf.cast(tensor, tf.bfloat16)}

    def decode(self, payload: Payload) -> Tensor:
        """Return the values as float32 (n,)."""
        import tensorflow as tf

        return tf.cast(payload["values"], tf.float32)
