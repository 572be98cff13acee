"""The greatest elements of a momentum that waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveFloat

from labkit.common.errors import InvalidInput
from labkit.compression.blocks import greatest
from labkit.compression.compressor import (
    Compressor,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    compiled,
    in_one_loop,
    next_key,
)
from labkit.compression.payload import Tensor
from labkit.compression.residual_law import Waiting
from labkit.compression.selection import scatter
from labkit.compression.topk import TopK

STAGES = 4  # of the warm-up: 75, 93.75, 98.4375 and 99.6 % are not sent


class DGC(Compressor):
    r"""Momentum on each rank before the sum; what is great enough is sent, the rest waits.

    \(u \leftarrow m u + g\), \(v \leftarrow v + u\); the greatest of v are sent; where they
    stood, v and u become zero (momentum factor masking). Conserved: v after + sent = v before +
    u. Training starts with more: \(4^{-1}, 4^{-2}, 4^{-3}, 4^{-4}\) of the elements, a quarter
    of the warm-up each. The optimizer must have no momentum of its own.

    Args:
        ratio: of the elements, how many are sent after the warm-up.
        momentum: m; 0: none.
        clip_norm: of the mean gradient. Each rank's own is scaled down to at most this norm times
            the root of the number of ranks: the mean of independent ones then has it; None: no
            clipping.
        warmup_steps: steps until `ratio` is reached; 0: at once.

    Source: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep Gradient Compression, 2018, arXiv
    1712.01887. Differs from it: the norm that is clipped is that of a bucket, not of all layers
    together; the threshold comes from a sample of 64 n/k elements; no Nesterov momentum.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Lin 2018, arXiv 1712.01887"
    memory: ClassVar[bool] = True

    ratio: float = Field(0.001, gt=0, le=1, kw_only=False)
    momentum: float = Field(0.9, ge=0, lt=1)
    clip_norm: PositiveFloat | None = None
    warmup_steps: NonNegativeInt = 0

    def check(self, optimizer: str, options: Mapping[str, Any]) -> None:
        """The momentum is in here: the optimizer must be SGD without any."""
        if optimizer != "sgd" or options.get("momentum"):
            momentum = f" with momentum={options['momentum']}" if options.get("momentum") else ""
            raise InvalidInput(
                "DGC corrects the momentum of SGD itself, which "
                f"optimizer={optimizer!r}{momentum} would apply twice; use "
                "optimizer='sgd' without momentum, and DGC(momentum=…)"
            )

    def unsupported_reason(self) -> str:
        """A server answers with weights."""
        return (
            "keeps the momentum of gradients, but servers answer with differences of weights, "
            "which have none"
        )

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Key; velocity u and accumulation v, zeros; the norm that this many ranks clip to."""
        import tensorflow as tf

        # The paper's 1/sqrt(n) is for parts of a sum; here each rank brings n times its part.
        limit = tf.constant((self.clip_norm or 0) * ranks**0.5)
        return super().start(shape, rank, seed), tf.zeros(shape), tf.zeros(shape), limit

    def density(self, step: int) -> float:
        """Share of the elements that is sent in a step, counted from 0."""
        if step >= self.warmup_steps:
            return self.ratio
        return max(self.ratio, 0.25 ** (1 + step * STAGES // self.warmup_steps))

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Mean of what ranks send of their accumulations."""

        key, velocity, waiting, limit = state
        density = self.density(int(key[1]))  # a key counts the steps
        take = compiled(self, "take")
        indices, values, velocity, waiting = take(tensor, velocity, waiting, limit, key, density)
        length = tensor.shape[0]
        mean = yield SparseMean(indices, values, length)
        sent = scatter(indices, values, length)
        return Reduced(mean, sent, (next_key(key), velocity, waiting, limit))

    def take(
        self,
        tensor: Tensor,
        velocity: Tensor,
        waiting: Tensor,
        limit: Tensor,
        key: Tensor,
        density: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Indices and values (k,) of what is sent; velocity and accumulation (n,) without it."""
        import tensorflow as tf

        # In one loop over all three; the search behind it has shapes that XLA cannot know.
        velocity, waiting = in_one_loop(self.accumulate, tensor, velocity, waiting, limit)
        indices, values = TopK(ratio=density).select(waiting, key)
        # Momentum factor masking: what was sent shall not push once more. In place, for both were
        # made here, and the search, which alone has read them, has come to its end.
        with tf.control_dependencies([indices, values]):
            velocity, waiting = (
                tf.raw_ops.InplaceUpdate(x=each, i=indices, v=tf.zeros_like(values))
                for each in (velocity, waiting)
            )
        return indices, values, velocity, waiting

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """A sum of sparse vectors."""
        return ((SparseMean, payload),)

    def accumulate(
        self, tensor: Tensor, velocity: Tensor, waiting: Tensor, limit: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Velocity and accumulation with a step's gradient; both (n,)."""
        import tensorflow as tf

        if self.clip_norm is not None:
            tensor = _clipped(tensor, tf.cast(limit, tensor.dtype))
        velocity = self.momentum * tf.cast(velocity, tensor.dtype) + tensor
        return velocity, tf.cast(waiting, tensor.dtype) + velocity

    def residual(self, state: State) -> Tensor:
        """The accumulation v, (n,)."""
        return state[2]

    def waiting(self, ranks: int) -> Waiting:
        """Books of the accumulation v, by the paper's law."""
        return Accumulated(self, ranks)


def _clipped(tensor: Tensor, limit: Tensor) -> Tensor:
    """The tensor with a 2-norm of at most the limit; squares of its elements may be infinite."""
    import tensorflow as tf

    most = greatest(tensor, None)
    shares = tf.math.divide_no_nan(tensor, most)
    norm = tf.sqrt(tf.reduce_sum(shares * shares))
    return tf.where(norm * most > limit, shares * (limit / norm), tensor)


class Accumulated(Waiting):
    r"""What waits is all velocities, less all that was sent; what was sent has no velocity left.

    \(u_t = m (1 - M_{t-1}) u_{t-1} + g_t\) and \(v_T = \sum_t u_t - \sum_t s_t\), where M marks the
    elements that were sent and g is clipped: momentum correction and factor masking of the paper.
    """

    def __init__(self, compressor: DGC, ranks: int) -> None:
        super().__init__()
        self._momentum, norm = compressor.momentum, compressor.clip_norm
        # Rounded as the compressor keeps it.
        self._limit = None if norm is None else float(np.float32(norm * ranks**0.5))
        self._velocity: np.ndarray | float = 0.0

    def after(self, given: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """What must wait after one more step; all of them (n,)."""
        wide = given.astype(np.float64)
        if self._limit is not None:
            wide *= self._limit / max(float(np.linalg.norm(wide)), self._limit)
        velocity = self._momentum * self._velocity + wide
        self._velocity = np.where(sent != 0, 0.0, velocity)
        return super().after(velocity, sent)
