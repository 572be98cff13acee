"""Low-rank factors of each layer's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from pydantic import Field

from labkit.compression.blocks import greatest
from labkit.compression.compressor import (
    Compressor,
    Mean,
    Reduced,
    Reduction,
    Request,
    State,
    TensorContext,
    compiled,
    in_one_loop,
    next_key,
)
from labkit.compression.payload import Payload, Tensor


class PowerSGD(Compressor):
    r"""Two thin factors of each matrix, one step of a power iteration, summed on the way.

    \(P = \mathrm{orth}(\mathrm{mean}(M_r Q))\), \(Q = \mathrm{mean}(M_r^\top P)\),
    \(\bar g = P Q^\top\): \(r (n + m)\) numbers instead of \(n m\). Best under `ErrorFeedback`.
    Vectors, and matrices that are smaller than their factors, are sent as they are. Of elements
    near the greatest float an approximation may be greater still, and infinite.

    Args:
        approximation_rank: columns of the factors; lower: fewer bytes, more error.
        warm_start: begin with the last step's Q, which gets better from step to step; if not,
            with a random one.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, 2019, arXiv 1905.13727. Differs from
    it: Householder's QR orthogonalises, not Gram-Schmidt, so that a gradient of zero does not
    stop the iteration; Keras keeps a kernel's outputs last, so that matrices are the transposes
    of the paper's.
    """

    family: ClassVar[str] = "low rank"
    paper: ClassVar[str] = "Vogels 2019, arXiv 1905.13727"
    by_layer: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    approximation_rank: int = Field(2, ge=1, kw_only=False)
    warm_start: bool = True

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Key and Q (m, r) of the first step; all ranks have the same."""
        key = super().start(shape, rank, seed)
        _, columns = _matrix(shape)
        return key, self.random(key, columns)

    def random(self, key: Tensor, columns: int) -> Tensor:
        """A Q to start with, (columns, r)."""
        import tensorflow as tf

        return tf.random.stateless_normal([columns, self.approximation_rank], key)

    def elements(self, shape: Sequence[int]) -> int:
        """How many numbers a rank hands over for a layer of this shape."""
        return min(prod(shape), self.approximation_rank * sum(_matrix(shape)))

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Mean over the ranks, of rank `approximation_rank`."""
        key, q = state
        # Factors would be as large: a bias, or a thin matrix.
        if self.elements(tensor.shape) == prod(tensor.shape):
            mean = yield Mean(tensor)
            return Reduced(mean, tensor, (next_key(key), q))
        if not self.warm_start:
            # From the key that all ranks share, or their factors would not belong together.
            q = self.random(key, q.shape[0])
        # A mean of products is the product of the mean: M is never sent itself.
        p = yield Mean(compiled(self, "project")(tensor, q))
        p, own = compiled(self, "project_back")(tensor, p)
        q = yield Mean(own)
        mean, sent = compiled(self, "expand")(tensor, p, q, own)
        return Reduced(mean, sent, (next_key(key), q))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Both factors, one after the other; or the whole, where these would be as large."""
        if self.elements(shape) == prod(shape):
            return ((Mean, 4.0 * prod(shape)),)
        return tuple((Mean, 4.0 * self.approximation_rank * side) for side in _matrix(shape))

    def say(self, tensor: Tensor, state: State) -> TensorContext:
        """One rank's factors; here they travel themselves, with the layer's rows and columns."""
        import tensorflow as tf

        key, q = state
        rows = tf.constant(_matrix(tensor.shape)[:1])
        if self.elements(tensor.shape) == prod(tensor.shape):
            whole = {"values": tf.reshape(tensor, [-1])}
            return TensorContext(whole, tensor, (next_key(key), q))
        if not self.warm_start:
            q = self.random(key, q.shape[0])
        p, q = compiled(self, "project_back")(tensor, compiled(self, "project")(tensor, q))
        payload = {"p": tf.reshape(p, [-1]), "q": tf.reshape(q, [-1]), "rows": rows}
        return TensorContext(
            payload, tf.reshape(self.understand(payload), tensor.shape), (next_key(key), q)
        )

    def decode(self, payload: Payload) -> Tensor:
        """The product of two factors, or the vector, flat."""
        import tensorflow as tf

        if "values" in payload:
            return payload["values"]
        p, q = (tf.reshape(payload[name], [-1, self.approximation_rank]) for name in ("p", "q"))
        return tf.reshape(tf.matmul(p, q, transpose_b=True), [-1])

    def project(self, tensor: Tensor, q: Tensor) -> Tensor:
        """M Q, (n, r)."""
        import tensorflow as tf

        # By XLA, which reads the large factor where it lies; TensorFlow would copy it first.
        matrix = tf.reshape(tensor, _matrix(tensor.shape))
        # Shares of the columns: no sum of products is greater than the greatest element.
        q = _directions(tf.cast(q, tensor.dtype)) / max(matrix.shape[1], 1)
        return in_one_loop(tf.matmul, matrix, q)

    def project_back(self, tensor: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """P, orthonormal times a number s, (n, r), and the transpose of M by P / s², (m, r)."""
        import tensorflow as tf

        p = tf.linalg.qr(_directions(p)).q
        # A matrix is read faster by its rows: (r, n) by (n, m) rather than (m, n) by (n, r).
        matrix = tf.reshape(tensor, _matrix(tensor.shape))
        # s ≥ √n, as the norm of a column is up to √n times its greatest element; a power of two, by
        # which products are exact.
        s = 2.0 ** ((matrix.shape[0].bit_length() + 1) // 2)
        rows = in_one_loop(tf.matmul, tf.transpose(p / s), matrix)
        return p * s, tf.transpose(rows)

    def expand(self, like: Tensor, p: Tensor, q: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """P by the ranks' Q and P by this rank's, in the layer's shape."""
        import tensorflow as tf

        mean, sent = (in_one_loop(tf.matmul, p, tf.transpose(factor)) for factor in (q, own))
        return tf.reshape(mean, like.shape), tf.reshape(sent, like.shape)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a layer's matrix: its inputs by its outputs; a vector is one column."""
    rows = prod(shape[:-1]) if len(shape) > 1 else prod(shape)
    return rows, shape[-1] if len(shape) > 1 else 1


def _directions(factor: Tensor) -> Tensor:
    """A factor whose greatest element is 1: the length of its columns is of no consequence.

    Its squares and its products with other factors are floats, whatever the size of a gradient.
    """
    import tensorflow as tf

    return tf.math.divide_no_nan(factor, greatest(tf.reshape(factor, [-1]), None))
