"""Compressors that keep some of the values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from labkit.compression.compressor import (
    Compressor,
    Payload,
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
from labkit.compression.numbers import from_bits, magnitude_bits

# The search for large elements tests blocks of `BLOCK` elements. Most blocks contain none of the
# largest 1 % of elements.
BLOCK = 16


class Sparse(Compressor):
    """A compressor that sends the elements that `select` returns, together with their indices."""

    sparse: ClassVar[bool] = True
    eager: ClassVar[tuple[str, ...]] = ("decode",)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices to send, int32 (k,), ascending, and their values (k,)."""
        raise NotImplementedError(f"{type(self).__name__} must define select")

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return "indices" (ascending int32, (k,)), "values" (k,) and "length" (int32, (1,))."""
        import tensorflow as tf

        indices, values = self.select(tensor, key)
        return {"indices": indices, "values": values, "length": tf.constant([tensor.shape[0]])}

    def decode(self, payload: Payload) -> Tensor:
        """Return a dense tensor (n,) with the values at their indices, and zeros elsewhere."""
        return scatter(payload["indices"], payload["values"], payload["length"][0])

    def reduce(self, tensor: Tensor, state: State) -> Reduction:
        """Compute the mean of the sparse vectors that the ranks send."""
        payload = compiled(self, "encode")(tensor, state)
        mean = yield SparseMean(payload["indices"], payload["values"], tensor.shape[0])
        return Reduced(mean, self.decode(payload), next_key(state))

    def collectives(
        self, shape: Sequence[int], payload: float
    ) -> tuple[tuple[type[Request], float], ...]:
        """Return one request, a `SparseMean`, with the bytes that a rank sends for it."""
        return ((SparseMean, payload),)


def count(ratio: float, length: int) -> int:
    """Return the number of elements to send: at least 1, unless the length is 0."""
    return min(length, max(1, round(ratio * length)))


def scatter(indices: Tensor, values: Tensor, length: Tensor) -> Tensor:
    """Return a dense vector (length,) with `values` (k,) at `indices` and zeros elsewhere."""
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

    The function returns the indices, int32 (k,) in ascending order, and the values (k,). The search
    first tests whole blocks, then only the elements of blocks that reach the threshold. A search by
    blocks is faster than `tf.where` on all elements, because it reads most blocks only once.
    """
    import tensorflow as tf

    whole = tensor.shape[0] // BLOCK * BLOCK
    rows = tf.reshape(tensor[:whole], [-1, BLOCK])
    matching = tf.where(run_fused(_any_reaches, rows, threshold))[:, 0]  # (matching rows,)
    candidates = tf.reshape(tf.gather(rows, matching), [-1])
    hits = tf.where(_reaches(candidates, threshold))[:, 0]
    whole_indices = tf.gather(matching, hits // BLOCK) * BLOCK + hits % BLOCK
    tail = tensor[whole:]
    tail_hits = tf.where(_reaches(tail, threshold))[:, 0]
    indices = tf.cast(tf.concat([whole_indices, tail_hits + whole], 0), tf.int32)
    return indices, tf.concat([tf.gather(candidates, hits), tf.gather(tail, tail_hits)], 0)


def _any_reaches(rows: Tensor, threshold: Tensor) -> Tensor:
    import tensorflow as tf

    # `tf.reduce_any` is faster than `tf.reduce_max`, because XLA computes a maximum element by
    # element.
    return tf.reduce_any(_reaches(rows, threshold), 1)


def _reaches(values: Tensor, threshold: Tensor | float) -> Tensor:
    """Return, for each value, whether it is NaN or its magnitude reaches the threshold."""
    import tensorflow as tf

    return magnitude_bits(values) >= magnitude_bits(tf.cast(threshold, values.dtype))


def draw(key: Tensor, k: Tensor | int, n: Tensor | int) -> tuple[Tensor, Tensor]:
    """Divide n elements into k ranges; return a random index and the length of each range."""
    import tensorflow as tf

    k, n = tf.cast(k, tf.int64), tf.cast(n, tf.int64)
    bounds = tf.range(k + 1) * n // tf.maximum(k, 1)
    pieces = bounds[1:] - bounds[:-1]
    # Random positions have double precision, so that every element of a long range can be selected.
    place = tf.random.stateless_uniform([k], key, dtype=tf.float64)
    indices = bounds[:-1] + tf.cast(place * tf.cast(pieces, tf.float64), tf.int64)
    return tf.cast(indices, tf.int32), pieces


HITS = 64  # The sample is so large that about `HITS` sampled elements exceed the threshold.


class TopK(Sparse):
    r"""The k largest elements by magnitude, \(k = \max(1, \mathrm{round}(\mathrm{ratio}\cdot n))\).

    \(\|\hat g - g\|^2 \le (1 - k/n) \|g\|^2\). TopK works best when it is wrapped in
    `ErrorFeedback`, which sends the other elements later.

    Args:
        ratio: The fraction of elements that are sent.
        threshold: Either "exact" or "sampled"; "exact" sends exactly k elements, selected from
            those above a threshold. "sampled" sends all elements above the threshold, about k
            elements. If more than 2 k elements exceed the threshold, "sampled" sends the k largest
            elements. The threshold is estimated from a random sample. With "sampled", zeros are
            never sent. Tensors that are not much longer than the sample are sorted without a
            threshold.

    Source: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
    arXiv 1704.05021. Sampling: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep Gradient
    Compression, 2018, arXiv 1712.01887. Difference from the papers: the sample contains 64 n/k of
    the n elements, not a fixed fraction.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Aji 2017, arXiv 1704.05021"

    ratio: float = Field(0.01, gt=0, le=1, kw_only=False)
    threshold: Literal["exact", "sampled"] = "sampled"

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest elements: indices, int32 (k,), ascending, and values (k,)."""
        n = tensor.shape[0]
        k = count(self.ratio, n)
        sample = HITS * n // max(k, 1)
        if 4 * sample >= n:
            return _largest(tensor, k)
        if self.threshold == "exact":
            return _select_exact(tensor, k, sample, key)
        return _select_sampled(tensor, k, sample, key)


def _largest(tensor: Tensor, k: int) -> tuple[Tensor, Tensor]:
    import tensorflow as tf

    # Indices are sorted, because sums of sparse vectors merge sorted indices.
    indices = tf.sort(tf.math.top_k(magnitude_bits(tensor), k, sorted=False).indices)
    return indices, tf.gather(tensor, indices)


def _largest_of(indices: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of the given elements: their indices in the tensor, and their values."""
    import tensorflow as tf

    places, largest = _largest(values, k)
    return tf.gather(indices, places), largest


def _select_exact(tensor: Tensor, k: int, sample: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return exactly the k largest elements, selected from those above a sampled threshold."""
    import tensorflow as tf

    candidates, values = select_above(tensor, _threshold(tensor, sample, HITS * 3 // 2, key))
    # The threshold comes from a sample, so too few elements may pass.
    is_enough = tf.size(candidates) >= k
    indices, values = tf.cond(
        is_enough, lambda: _largest_of(candidates, values, k), lambda: _largest(tensor, k)
    )
    return indices, values


def _select_sampled(tensor: Tensor, k: int, sample: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return all elements above a sampled threshold; if more than 2 k, only the k largest."""
    import tensorflow as tf

    candidates, values = select_above(tensor, _threshold(tensor, sample, HITS, key))
    # If the sample is poor, the threshold selects too many elements.
    too_many = tf.size(candidates) > 2 * k
    indices, values = tf.cond(
        too_many, lambda: _largest_of(candidates, values, k), lambda: (candidates, values)
    )
    return indices, values


def _threshold(tensor: Tensor, sample: int, hits: int, key: Tensor) -> Tensor:
    """Return the `hits`-th largest sampled magnitude, or the smallest normal float if larger."""
    import tensorflow as tf

    # A separate XLA cluster gathers the sample in memory order, which avoids cache misses.
    places, _ = draw(key, sample, tensor.shape[0])
    sizes = run_fused(_sizes, tensor, places)
    hits = min(hits, sample)
    threshold = tf.reduce_min(tf.math.top_k(sizes, hits, sorted=False).values)
    # If most elements are zero, the threshold from the sample is zero. The lower bound `least` of
    # the threshold excludes elements that are zero.
    least = magnitude_bits(tf.constant(np.finfo(tensor.dtype.as_numpy_dtype).tiny, tensor.dtype))
    return from_bits(tf.maximum(threshold, least))


def _sizes(tensor: Tensor, places: Tensor) -> Tensor:
    import tensorflow as tf

    return magnitude_bits(tf.gather(tensor, places))


class RandomK(Compressor):
    r"""Sends one random element from each of k equal ranges, at the same indices on all ranks.

    The compressor sends \(k = \max(1, \mathrm{round}(\mathrm{ratio} \cdot n))\) of n elements. Only
    values are sent, without indices, and an allreduce sums the values. Without `rescale`, the
    expectation of the decoded tensor is \(E\,\hat g = \frac{k}{n} g\). A decoded tensor without
    `rescale` is suitable for `ErrorFeedback`. With `rescale`, \(\hat g_i = \frac{n}{k} g_i\) for
    selected elements. With `rescale`, the expectation of the decoded tensor is the gradient:
    \(E\,\hat g = g\). The squared error is \(E \|\hat g - g\|^2 = (\frac{n}{k} - 1) \|g\|^2\) for k
    sent elements of n. With `rescale`, the product of n/k and an element must not overflow. NaN in
    elements that are not selected remains undetected.

    Args:
        ratio: The fraction of elements that are sent.
        rescale: Whether the k sent elements of n are multiplied by n/k. With `rescale`, the
            expectation of the decoded tensor is the gradient.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599. Rescaled: J. Wangni, J. Wang, J. Liu, T. Zhang, Gradient Sparsification for
    Communication-Efficient Distributed Optimization, 2017, arXiv 1710.09854. Difference from the
    papers: one element of each range is sent instead of any k, with equal expectation. If k does
    not divide n, the lengths of ranges differ by one. With `rescale`, each selected element is
    multiplied by the length of its range.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Stich 2018, arXiv 1809.07599"
    linear: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    sparse: ClassVar[bool] = True

    ratio: float = Field(0.01, gt=0, le=1, kw_only=False)
    rescale: bool = False

    @property
    def unbiased(self) -> bool:
        """Whether the decoded tensor is an unbiased estimate of the encoder's input."""
        return self.rescale

    @property
    def expansive(self) -> bool:
        """Whether the error may exceed the tensor, because sent values are multiplied by n/k."""
        return self.rescale

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Return "values" (k,), the "key" that draws the indices (2,), and "length", int32 (1,)."""
        import tensorflow as tf

        n = tensor.shape[0]
        indices, pieces = draw(key, count(self.ratio, n), n)
        values = tf.gather(tensor, indices)
        if self.rescale:
            values *= tf.cast(pieces, values.dtype)
        return {"values": values, "key": key, "length": tf.constant([n])}

    def decode(self, payload: Payload) -> Tensor:
        """Return a dense tensor (n,) with the values at their indices, and zeros elsewhere."""
        import tensorflow as tf

        values, n = payload["values"], payload["length"][0]
        indices, _ = draw(payload["key"], tf.size(values), n)
        return scatter(indices, values, n)


class Threshold(Sparse):
    r"""Sends elements with magnitudes of at least `value`; their number depends on the gradient.

    Args:
        value: The smallest magnitude that is sent, in the units of the gradient.

    Source: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
    Interspeech 2015. Difference from the paper: elements are sent unchanged, not as plus or minus
    the threshold; only `ErrorFeedback` stores the unsent part.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Strom 2015, Interspeech"

    value: float = Field(gt=0, kw_only=False)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices, int32 (k,), and values (k,) of elements that reach the threshold."""
        return select_above(tensor, self.value)
