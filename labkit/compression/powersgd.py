"""PowerSGD: each layer's gradient is sent as two low-rank factors."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

from pydantic import Field

from labkit.compression.compressor import (
    Compressor,
    Mean,
    Payload,
    PeerMessage,
    Reduced,
    Reduction,
    Request,
    State,
    Tensor,
    compiled,
    next_key,
    run_fused,
)
from labkit.compression.quantization import max_magnitudes


class PowerSGD(Compressor):
    r"""One power iteration gives two thin factors per matrix; allreduces compute their means.

    For the gradient matrices \(M_r\) of the ranks r, the factors are \(P =
    \mathrm{orth}(\mathrm{mean}(M_r Q))\) and \(Q = \mathrm{mean}(M_r^\top P)\). The product \(\bar
    g = P Q^\top\) of the factors approximates the mean gradient. Each gradient matrix \(M_r\) has n
    rows and m columns. If each factor has k columns, \(k (n + m)\) numbers are sent instead of \(n
    m\). PowerSGD works best when it is wrapped in `ErrorFeedback`. Vectors, and matrices smaller
    than their factors, are sent unchanged. For elements near the largest float the approximation
    may overflow to infinity.

    Args:
        approximation_rank: The number of columns of each factor; fewer columns mean fewer bytes and
            a larger error.
        warm_start: Whether each iteration starts with the factor Q of the previous step. A start
            with the previous Q improves the approximation. If `warm_start` is False, each iteration
            starts with a random Q.

    Source: T. Vogels, S. P. Karimireddy, M. Jaggi, PowerSGD, 2019, arXiv 1905.13727. Difference
    from the paper: labkit orthogonalises with Householder's QR instead of Gram-Schmidt, so that a
        zero gradient does not stop the iteration; the last axis of a Keras kernel indexes outputs,
        so that matrices are transposed relative to the paper.
    """

    family: ClassVar[str] = "low rank"
    paper: ClassVar[str] = "Vogels 2019, arXiv 1905.13727"
    by_layer: ClassVar[bool] = True
    shared: ClassVar[bool] = True

    approximation_rank: int = Field(2, ge=1, kw_only=False)
    warm_start: bool = True

    def start(self, shape: Sequence[int], rank: int = 0, seed: int = 0, ranks: int = 1) -> State:
        """Return the first step's random key and factor Q (m, r), which are equal on all ranks."""
        key = super().start(shape, rank, seed)
        _, columns = _matrix(shape)
        return key, self.random(key, columns)

    def random(self, key: Tensor, columns: int) -> Tensor:
        """Return a random initial factor Q, (columns, approximation_rank)."""
        import tensorflow as tf

        return tf.random.stateless_normal([columns, self.approximation_rank], key)

    def elements(self, shape: Sequence[int]) -> int:
        """Return how many numbers a rank sends for a layer of the shape `shape`."""
        return min(prod(shape), self.approximation_rank * sum(_matrix(shape)))

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean over ranks, approximated by a matrix of rank `approximation_rank`."""
        key, q = state
        # A bias or a thin matrix is sent unchanged, because its two factors would not be smaller.
        if self.elements(tensor.shape) == prod(tensor.shape):
            mean = yield Mean(tensor)
            return Reduced(mean, tensor, (next_key(key), q))
        if not self.warm_start:
            # All ranks draw the matrix Q from a common random key. Only factors for the same matrix
            # Q can be averaged.
            q = self.random(key, q.shape[0])
        # The mean of the ranks' products M Q equals mean(M) Q. The gradient matrix M itself is
        # therefore never sent.
        p = yield Mean(compiled(self, "project")(tensor, q))
        p, local_q = compiled(self, "project_back")(tensor, p)
        q = yield Mean(local_q)
        mean, sent = compiled(self, "expand")(tensor, p, q, local_q)
        return Reduced(mean, sent, (next_key(key), q))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return two requests for the factors, or one for the tensor if it is not larger."""
        if self.elements(shape) == prod(shape):
            return ((Mean, 4.0 * prod(shape)),)
        return tuple((Mean, 4.0 * self.approximation_rank * side) for side in _matrix(shape))

    def compress(self, tensor: Tensor, state: State) -> PeerMessage:
        """Compress a tensor to its two factors and its number of rows, for a single receiver."""
        import tensorflow as tf

        key, q = state
        rows = tf.constant(_matrix(tensor.shape)[:1])
        if self.elements(tensor.shape) == prod(tensor.shape):
            whole = {"values": tf.reshape(tensor, [-1])}
            return PeerMessage(whole, tensor, (next_key(key), q))
        if not self.warm_start:
            q = self.random(key, q.shape[0])
        p, q = compiled(self, "project_back")(tensor, compiled(self, "project")(tensor, q))
        payload = {"p": tf.reshape(p, [-1]), "q": tf.reshape(q, [-1]), "rows": rows}
        return PeerMessage(
            payload, tf.reshape(self.decompress(payload), tensor.shape), (next_key(key), q)
        )

    def decode(self, payload: Payload) -> Tensor:
        """Return the product of the two factors, or the unchanged tensor, as a flat tensor (n,)."""
        import tensorflow as tf

        if "values" in payload:
            return payload["values"]
        p, q = (tf.reshape(payload[name], [-1, self.approximation_rank]) for name in ("p", "q"))
        return tf.reshape(tf.matmul(p, q, transpose_b=True), [-1])

    def project(self, tensor: Tensor, q: Tensor) -> Tensor:
        """Return the product M Q (n, r) for the gradient matrix M, up to a scale."""
        import tensorflow as tf

        # XLA reads the large matrix in place, while TensorFlow without XLA would copy it first.
        matrix = tf.reshape(tensor, _matrix(tensor.shape))
        # The factor Q is divided by the number of columns of the gradient M. After the division, no
        # element of M Q exceeds M's largest element.
        q = _directions(tf.cast(q, tensor.dtype)) / max(matrix.shape[1], 1)
        return run_fused(tf.matmul, matrix, q)

    def project_back(self, tensor: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors sP and MᵀP/s of the gradient M, for a power of two s."""
        import tensorflow as tf

        p = tf.linalg.qr(_directions(p)).q
        # The gradient matrix is read by rows. An (r, n) by (n, m) product is faster than (m, n) by
        # (n, r).
        matrix = tf.reshape(tensor, _matrix(tensor.shape))
        # The norm of n elements is at most √n times the largest element. The division by s ≥ √n
        # keeps the product with the matrix finite. Products with a power of two, such as s, have no
        # rounding error.
        s = 2.0 ** ((matrix.shape[0].bit_length() + 1) // 2)
        rows = run_fused(tf.matmul, tf.transpose(p / s), matrix)
        return p * s, tf.transpose(rows)

    def expand(self, like: Tensor, p: Tensor, q: Tensor, local_q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of P with the mean Q and with this rank's Q."""
        import tensorflow as tf

        mean, sent = (run_fused(tf.matmul, p, tf.transpose(factor)) for factor in (q, local_q))
        return tf.reshape(mean, like.shape), tf.reshape(sent, like.shape)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return a layer's numbers of inputs (rows) and outputs (columns); a vector has 1 column."""
    rows = prod(shape[:-1]) if len(shape) > 1 else prod(shape)
    return rows, shape[-1] if len(shape) > 1 else 1


def _directions(factor: Tensor) -> Tensor:
    """Scale a factor so that its largest element is 1; only its columns' directions matter.

    The scaling avoids overflow and underflow in squares and products, whether the gradient is small
    or large.
    """
    import tensorflow as tf

    return tf.math.divide_no_nan(factor, max_magnitudes(tf.reshape(factor, [-1]), None))
