"""What compressors share that send few elements and say where they stand."""

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
    in_one_loop,
    next_key,
)
from labkit.compression.payload import Payload, Tensor
from labkit.compression.sizes import bits

ROW = 16  # elements that are looked at together: most rows of a top 1 % hold none


class Sparse(Compressor):
    """Sends the elements that `select` finds, with their indices; sums are merged on the way."""

    sparse: ClassVar[bool] = True
    eager: ClassVar[tuple[str, ...]] = ("decode",)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Indices of what is sent, int32 (k,), ascending, and its values (k,)."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it sends")

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Parts "indices", int32 (k,), ascending; "values" (k,); "length", int32 (1,)."""
        import tensorflow as tf

        indices, values = self.select(tensor, key)
        return {"indices": indices, "values": values, "length": tf.constant([tensor.shape[0]])}

    def decode(self, payload: Payload) -> Tensor:
        """The values where they stood, else zero, (n,)."""
        return scatter(payload["indices"], payload["values"], payload["length"][0])

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Mean of the sparse vectors of all ranks."""
        payload = compiled(self, "encode")(tensor, state)
        mean = yield SparseMean(payload["indices"], payload["values"], tensor.shape[0])
        return Reduced(mean, self.decode(payload), next_key(state))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """A sum of sparse vectors."""
        return ((SparseMean, payload),)


def count(ratio: float, length: int) -> int:
    """Elements that are sent of so many: at least 1, unless there is none."""
    return min(length, max(1, round(ratio * length)))


def scatter(indices: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """A dense vector, (length,), from values (k,) at distinct indices, int32 (k,)."""
    import tensorflow as tf

    # tf.scatter_nd is slow by the element; tf.math.unsorted_segment_sum makes a second vector.
    return tf.raw_ops.SparseToDense(
        sparse_indices=indices,
        output_shape=[length],
        sparse_values=values,
        default_value=tf.zeros([], values.dtype),
        validate_indices=False,
    )


def above(tensor: Tensor, threshold: Tensor | float) -> tuple[Tensor, Tensor]:
    """Indices, int32 (k,), ascending, and values of elements that are as great, or NaN.

    Rows are looked through first and then the elements of those that hold one: faster than
    `tf.where` on all elements, and a value that was just looked at is near.
    """
    import tensorflow as tf

    whole = tensor.shape[0] // ROW * ROW
    rows = tf.reshape(tensor[:whole], [-1, ROW])
    held = tf.where(in_one_loop(_reach, rows, threshold))[:, 0]  # (rows that hold one,)
    near = tf.reshape(tf.gather(rows, held), [-1])  # all elements of these rows
    found = tf.where(_reaches(near, threshold))[:, 0]
    inside = tf.gather(held, found // ROW) * ROW + found % ROW
    rest = tensor[whole:]
    behind = tf.where(_reaches(rest, threshold))[:, 0]
    indices = tf.cast(tf.concat([inside, behind + whole], 0), tf.int32)
    return indices, tf.concat([tf.gather(near, found), tf.gather(rest, behind)], 0)


def _reach(rows: Tensor, threshold: Tensor) -> Tensor:
    import tensorflow as tf

    # Faster than a comparison of the greatest one, which XLA finds element by element.
    return tf.reduce_any(_reaches(rows, threshold), 1)


def _reaches(values: Tensor, threshold: Tensor | float) -> Tensor:
    """Whether values are this great; NaN is, so that no selection passes over it."""
    import tensorflow as tf

    return bits(values) >= bits(tf.cast(threshold, values.dtype))


def draw(key: Tensor, k: Tensor | int, n: Tensor | int) -> tuple[Tensor, Tensor]:
    """An index out of each of k pieces of n elements, int32 (k,), and the pieces' lengths (k,)."""
    import tensorflow as tf

    k, n = tf.cast(k, tf.int64), tf.cast(n, tf.int64)
    bounds = tf.range(k + 1) * n // tf.maximum(k, 1)
    pieces = bounds[1:] - bounds[:-1]
    # Of double precision, so that no element of a long piece is out of reach.
    place = tf.random.stateless_uniform([k], key, dtype=tf.float64)
    drawn = bounds[:-1] + tf.cast(place * tf.cast(pieces, tf.float64), tf.int64)
    return tf.cast(drawn, tf.int32), pieces
