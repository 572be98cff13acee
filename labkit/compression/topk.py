"""Top-k sparsification: the k elements of largest magnitude are sent."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from labkit.compression.compressor import run_fused
from labkit.compression.payload import Tensor
from labkit.compression.selection import Sparse, count, draw, select_above
from labkit.compression.sizes import from_bits, magnitude_bits

HITS = 64  # intended number of sampled elements above the threshold


class TopK(Sparse):
    r"""The k largest elements by magnitude, \(k = \max(1, \mathrm{round}(\mathrm{ratio}\cdot n))\).

    \(\|\hat g - g\|^2 \le (1 - k/n) \|g\|^2\). TopK works best when it is wrapped in
    `ErrorFeedback`, which sends the other elements later.

    Args:
        ratio: The fraction of elements that are sent.
        threshold: Either "exact" or "sampled"; "exact" sends exactly k elements, selected from
            those above a threshold. "sampled" sends all elements above the threshold, about k; if
            more than 2 k elements exceed it, the k largest are sent. The threshold is estimated
            from a random sample. With "sampled", zeros are never sent. Tensors that are not much
            longer than the sample are sorted without a threshold.

    Source: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
    arXiv 1704.05021; the sampled threshold: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep
    Gradient Compression, 2018, arXiv 1712.01887. Differs from them: the sample contains 64 n/k
    elements, not a fixed fraction of all elements.
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
    # This flag is false if the sample is atypical or many elements are zero.
    is_enough = tf.size(candidates) >= k
    indices, values = tf.cond(
        is_enough, lambda: _largest_of(candidates, values, k), lambda: _largest(tensor, k)
    )
    return indices, values


def _select_sampled(tensor: Tensor, k: int, sample: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the elements above a sampled threshold, or the k largest if these are too many."""
    import tensorflow as tf

    candidates, values = select_above(tensor, _threshold(tensor, sample, HITS, key))
    too_many = tf.size(candidates) > 2 * k  # true if the sample is atypical
    indices, values = tf.cond(
        too_many, lambda: _largest_of(candidates, values, k), lambda: (candidates, values)
    )
    return indices, values


def _threshold(tensor: Tensor, sample: int, hits: int, key: Tensor) -> Tensor:
    """Return the `hits`-th largest sampled magnitude; at least the smallest normal float."""
    import tensorflow as tf

    # A separate XLA cluster gathers the sample in memory order, which avoids cache misses.
    places, _ = draw(key, sample, tensor.shape[0])
    sizes = run_fused(_sizes, tensor, places)
    hits = min(hits, sample)
    threshold = tf.reduce_min(tf.math.top_k(sizes, hits, sorted=False).values)
    # If most elements are zero, the sampled threshold is also zero; the minimum `least` excludes
    # zeros.
    least = magnitude_bits(tf.constant(np.finfo(tensor.dtype.as_numpy_dtype).tiny, tensor.dtype))
    return from_bits(tf.maximum(threshold, least))


def _sizes(tensor: Tensor, places: Tensor) -> Tensor:
    import tensorflow as tf

    return magnitude_bits(tf.gather(tensor, places))
