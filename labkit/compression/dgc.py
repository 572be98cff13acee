"""Deep Gradient Compression: ranks send the largest elements of an accumulated momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat

from labkit.common.errors import InvalidInput
from labkit.compression.compressor import (
    Compressor,
    ExpectedResidual,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    Tensor,
    compiled,
    next_key,
    run_fused,
)
from labkit.compression.quantization import max_magnitudes
from labkit.compression.sparsification import TopK, scatter

# The `STAGES` warm-up stages omit 75, 93.75, 98.4375 and 99.6 % of the gradient's elements.
STAGES = 4


class DGC(Compressor):
    r"""Each rank applies momentum locally, and sends the largest accumulated elements.

    The velocity is \(u \leftarrow m u + g\), with momentum m and gradient g. The accumulation is
    \(v \leftarrow v + u\), with the velocity u. The largest elements of the accumulation v are
    sent. Momentum factor masking sets velocity and accumulation to zero at the sent indices. The
    conservation law is: v after the step + sent elements = v before the step + u. In each quarter
    of the warm-up, ranks send a smaller fraction of the elements. During the warm-up, the sent
    fraction falls from 1/4 to 1/256, but never below the parameter `ratio`. The optimizer must be
    SGD without momentum, because DGC applies the momentum.

    Args:
        ratio: The fraction of elements that are sent after the warm-up.
        momentum: The factor m of the momentum; 0: no momentum.
        clip_norm: The maximum norm of the mean gradient. Each rank clips its gradient to
            `clip_norm` times the square root of the number of ranks. If the ranks' gradients are
            independent, their mean then has a norm of at most about `clip_norm`. If `clip_norm` is
            None, gradients are not clipped.
        warmup_steps: The number of steps until `ratio` is reached; 0: no warm-up.

    Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep Gradient Compression, 2018, arXiv
    1712.01887. Difference from the paper: labkit clips the gradient of each bucket separately,
    without Nesterov momentum. The sample that determines the threshold also has another size.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Lin 2018, arXiv 1712.01887"
    memory: ClassVar[bool] = True

    ratio: float = Field(0.001, gt=0, le=1, kw_only=False)
    momentum: float = Field(0.9, ge=0, lt=1)
    clip_norm: PositiveFloat | None = None
    warmup_steps: NonNegativeInt = 0

    def check(self, optimizer: str, options: Mapping[str, Any]) -> None:
        """Raise InvalidInput unless the optimizer is SGD without momentum; DGC applies its own."""
        if optimizer != "sgd" or options.get("momentum"):
            momentum = f" with momentum={options['momentum']}" if options.get("momentum") else ""
            raise InvalidInput(
                "DGC applies the momentum of SGD itself, which "
                f"optimizer={optimizer!r}{momentum} would apply twice; use optimizer='sgd' "
                "without momentum, and DGC(momentum=…)"
            )

    def unsupported_reason(self) -> str:
        """Return why parameter servers, which reply with weight differences, do not support DGC."""
        return (
            "applies momentum to gradients, but servers reply with differences of weights, to "
            "which no momentum applies"
        )

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return the random key, velocity u = 0, accumulation v = 0, and the clipping norm."""
        import tensorflow as tf

        # The clipping limit differs from Lin et al. 2018, because labkit averages gradients.
        limit = tf.constant((self.clip_norm or 0) * ranks**0.5)
        return super().start(shape, rank, seed), tf.zeros(shape), tf.zeros(shape), limit

    def density(self, step: int) -> float:
        """Return the fraction of elements that are sent in a training step (numbered from 0)."""
        if step >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, 0.25 ** (1 + step * STAGES // self.warmup_steps))

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean of the sparse vectors that ranks send."""

        key, velocity, accumulation, limit = state
        # The second number of a random key is the training step.
        density = self.density(int(key[1]))
        select = compiled(self, "select")
        indices, values, velocity, accumulation = select(
            tensor, velocity, accumulation, limit, key, density
        )
        length = tensor.shape[0]
        mean = yield SparseMean(indices, values, length)
        sent = scatter(indices, values, length)
        return Reduced(mean, sent, (next_key(key), velocity, accumulation, limit))

    def select(
        self,
        tensor: Tensor,
        velocity: Tensor,
        accumulation: Tensor,
        limit: Tensor,
        key: Tensor,
        density: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sent indices and values, (k,), and the new velocity and accumulation, (n,)."""
        import tensorflow as tf

        # A single XLA loop updates velocity and accumulation. The selection of elements is outside
        # the XLA cluster. The number of selected elements is unknown at compile time.
        velocity, accumulation = run_fused(self.accumulate, tensor, velocity, accumulation, limit)
        indices, values = TopK(ratio=density).select(accumulation, key)
        # Momentum factor masking (Lin et al. 2018) sets the velocity of sent elements to zero. The
        # in-place update waits for the selection, which is the only other operation that reads
        # velocity and accumulation.
        with tf.control_dependencies([indices, values]):
            velocity, accumulation = (
                tf.raw_ops.InplaceUpdate(x=vector, i=indices, v=tf.zeros_like(values))
                for vector in (velocity, accumulation)
            )
        return indices, values, velocity, accumulation

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return one request, a `SparseMean`, with the bytes that a rank sends for it."""
        return ((SparseMean, payload),)

    def accumulate(
        self, tensor: Tensor, velocity: Tensor, accumulation: Tensor, limit: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add a step's gradient; return the new velocity and the new accumulation, both (n,)."""
        import tensorflow as tf

        if self.clip_norm is not None:
            tensor = _clipped(tensor, tf.cast(limit, tensor.dtype))
        velocity = self.momentum * tf.cast(velocity, tensor.dtype) + tensor
        return velocity, tf.cast(accumulation, tensor.dtype) + velocity

    def residual(self, state: State) -> Tensor:
        """Return the accumulation v of unsent elements, (n,)."""
        return state[2]

    def expected_residual(self, ranks: int) -> ExpectedResidual:
        """Return an object that computes the expected accumulation v as in Lin et al. 2018."""
        return ExpectedAccumulation(self, ranks)


def _clipped(tensor: Tensor, limit: Tensor) -> Tensor:
    """Clip the tensor to the 2-norm `limit`, without overflow in the squares of its elements."""
    import tensorflow as tf

    largest = max_magnitudes(tensor, None)
    scaled = tf.math.divide_no_nan(tensor, largest)
    norm = tf.sqrt(tf.reduce_sum(scaled * scaled))
    return tf.where(norm * largest > limit, scaled * (limit / norm), tensor)


class ExpectedAccumulation(ExpectedResidual):
    r"""The expected accumulation: the sum of all velocities minus the sum of all sent tensors.

    With momentum m and clipped gradient g, the velocity is \(u_t = m (1 - M_{t-1}) u_{t-1} + g_t\).
    The mask M is 1 at sent elements. With sent tensor s, the accumulation is \(v_T = \sum_t u_t -
    \sum_t s_t\). The formulas of u and v are the momentum correction and the momentum factor
    masking of Lin et al. 2018.
    """

    def __init__(self, compressor: DGC, ranks: int) -> None:
        super().__init__()
        self._momentum, norm = compressor.momentum, compressor.clip_norm
        # The clipping norm is rounded to float32, as in the compressor's state.
        self._limit = None if norm is None else float(np.float32(norm * ranks**0.5))
        self._velocity: np.ndarray | float = 0.0

    def after(self, gradient: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Return the expected accumulation after one more step; all arrays have the shape (n,)."""
        clipped = gradient.astype(np.float64)
        if self._limit is not None:
            clipped *= self._limit / max(float(np.linalg.norm(clipped)), self._limit)
        velocity = self._momentum * self._velocity + clipped
        self._velocity = np.where(sent != 0, 0.0, velocity)
        return super().after(velocity, sent)
