"""Functions for compressors that send few elements together with their indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from labkit.compression.compressor import (
    Compressor,
    Reduced,
    Reduction,
    Request,
    SparseMean,
    State,
    compiled,
    next_key,
    run_fused,
)
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import magnitude_bits

BLOCK = 16  # elements per searched block; most blocks contain none of the top 1 %


class Sparse(Compressor):
    """A compressor that sends the elements that `select` returns, together with their indices."""

    sparse: ClassVar[bool] = True
    eager: ClassVar[tuple[str, ...]] = ("decode",)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices to send, int32 (k,), ascending, and their values (k,)."""
        raise NotImplementedError(f"{type(self).__name__} must define select")

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return "indices", int32 (k,), ascending; "values" (k,); "length", int32 (1,)."""
        import tensorflow as tf

        indices, values = self.select(tensor, key)
        return {"indices": indices, "values": values, "length": tf.constant([tensor.shape[0]])}

    def decode(self, payload: Payload) -> Tensor:
        """Return a dense tensor (n,): the values at their indices, and zeros at all others."""
        return scatter(payload["indices"], payload["values"], payload["length"][0])

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean of the sparse vectors that the ranks send."""
        payload = compiled(self, "encode")(tensor, state)
        mean = yield SparseMean(payload["indices"], payload["values"], tensor.shape[0])
        return Reduced(mean, self.decode(payload), next_key(state))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return the only request that `reduce` yields: a sparse mean."""
        return ((SparseMean, payload),)


def count(ratio: float, length: int) -> int:
    """Return the number of elements to send: at least 1, unless the length is 0."""
    return min(length, max(1, round(ratio * length)))


def scatter(indices: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """Return a dense vector (length,) with the values (k,) at distinct indices, int32 (k,)."""
    import tensorflow as tf

    # SparseToDense is used because tf.scatter_nd is slow per element, and
    # tf.math.unsorted_segment_sum allocates a second vector.
    return tf.raw_ops.SparseToDense(
        sparse_indices=indices,
        output_shape=[length],
        sparse_values=values,
        default_value=tf.zeros([], values.dtype),
        validate_indices=False,
    )


def select_above(tensor: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return all elements with a magnitude of at least a threshold, and all NaN.

    The function returns a pair: the indices, int32 (k,), ascending, and the values (k,). The search
    first tests whole blocks, then only the elements of blocks that reach the threshold. This search
    is faster than `tf.where` on all elements, because it reads most blocks only once.
    """
    import tensorflow as tf

    whole = tensor.shape[0] // BLOCK * BLOCK
    rows = tf.reshape(tensor[:whole], [-1, BLOCK])
    matching = tf.where(run_fused(_any_reaches, rows, threshold))[:, 0]  # (matching rows,)
    candidates = tf.reshape(tf.gather(rows, matching), [-1])  # all elements of the matching rows
    hits = tf.where(_reaches(candidates, threshold))[:, 0]
    whole_indices = tf.gather(matching, hits // BLOCK) * BLOCK + hits % BLOCK
    tail = tensor[whole:]
    tail_hits = tf.where(_reaches(tail, threshold))[:, 0]
    indices = tf.cast(tf.concat([whole_indices, tail_hits + whole], 0), tf.int32)
    return indices, tf.concat([tf.gather(candidates, hits), tf.gather(tail, tail_hits)], 0)


def _any_reaches(rows: Tensor, threshold: Tensor) -> Tensor:
    import tensorflow as tf

    # `reduce_any` is faster than a comparison with the maximum, which XLA computes element by
    # element.
    return tf.reduce_any(_reaches(rows, threshold), 1)


def _reaches(values: Tensor, threshold: Tensor | float) -> Tensor:
    """Return, for each value, whether it is NaN or its magnitude reaches the threshold."""
    import tensorflow as tf

    return magnitude_bits(values) >= magnitude_bits(tf.cast(threshold, values.dtype))


def draw(key: Tensor, k: Tensor | int, n: Tensor | int) -> tuple[Tensor, Tensor]:
    """Divide n elements into k ranges; return a random index in each, and each range's length."""
    import tensorflow as tf

    k, n = tf.cast(k, tf.int64), tf.cast(n, tf.int64)
    bounds = tf.range(k + 1) * n // tf.maximum(k, 1)
    pieces = bounds[1:] - bounds[:-1]
    # Double precision is needed, so that every element of a long range can be selected.
    place = tf.random.stateless_uniform([k], key, dtype=tf.float64)
    indices = bounds[:-1] + tf.cast(place * tf.cast(pieces, tf.float64), tf.int64)
    return tf.cast(indices, tf.int32), pieces
