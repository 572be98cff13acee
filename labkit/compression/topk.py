"""The greatest elements."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from labkit.compression.compressor import in_one_loop
from labkit.compression.payload import Tensor
from labkit.compression.selection import Sparse, above, count, draw
from labkit.compression.sizes import bits, from_bits

HITS = 64  # elements of a sample that lie above the threshold: it is met to about 1/sqrt(HITS)


class TopK(Sparse):
    r"""The k elements of greatest size, \(k = \max(1, \mathrm{round}(\mathrm{ratio} \cdot n))\).

    \(\|\hat g - g\|^2 \le (1 - k/n) \|g\|^2\). Best under `ErrorFeedback`, which sends the others
    later.

    Args:
        ratio: of the elements, how many are sent.
        threshold: "exact": k elements, sorted out of those that a random sample lets through.
            "sampled": all above the threshold that leaves k/n of a random sample; about k, and k
            exactly where these would be more than 2 k. Zeros are not sent. Tensors not much longer
            than the sample are sorted.

    Source: A. F. Aji, K. Heafield, Sparse Communication for Distributed Gradient Descent, 2017,
    arXiv 1704.05021; the sampled threshold: Y. Lin, S. Han, H. Mao, Y. Wang, W. J. Dally, Deep
    Gradient Compression, 2018, arXiv 1712.01887. Differs from them: the sample has 64 n/k
    elements, not a fixed share of all.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Aji 2017, arXiv 1704.05021"

    ratio: float = Field(0.01, gt=0, le=1, kw_only=False)
    threshold: Literal["exact", "sampled"] = "sampled"

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest elements: indices, int32 (k,), ascending, and values (k,)."""
        n = tensor.shape[0]
        k = count(self.ratio, n)
        sample = HITS * n // max(k, 1)
        if 4 * sample >= n:
            return _largest(tensor, k)
        if self.threshold == "exact":
            return _sifted(tensor, k, sample, key)
        return _sampled(tensor, k, sample, key)


def _largest(tensor: Tensor, k: int) -> tuple[Tensor, Tensor]:
    import tensorflow as tf

    # Ascending, as sums of sparse vectors are merged on their way.
    indices = tf.sort(tf.math.top_k(bits(tensor), k, sorted=False).indices)
    return indices, tf.gather(tensor, indices)


def _largest_of(found: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of elements that stood at the indices `found`."""
    import tensorflow as tf

    places, greatest = _largest(values, k)
    return tf.gather(found, places), greatest


def _sifted(tensor: Tensor, k: int, sample: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Exactly the k greatest: those of the elements above a threshold that leaves more than k."""
    import tensorflow as tf

    found, values = above(tensor, _threshold(tensor, sample, HITS * 3 // 2, key))
    enough = tf.size(found) >= k  # if not, a sample was unlucky, or most elements are zero
    indices, values = tf.cond(
        enough, lambda: _largest_of(found, values, k), lambda: _largest(tensor, k)
    )
    return indices, values


def _sampled(tensor: Tensor, k: int, sample: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Those above the threshold of a sample; where these are too many, the greatest of them."""
    import tensorflow as tf

    found, values = above(tensor, _threshold(tensor, sample, HITS, key))
    many = tf.size(found) > 2 * k  # a sample was unlucky
    indices, values = tf.cond(many, lambda: _largest_of(found, values, k), lambda: (found, values))
    return indices, values


def _threshold(tensor: Tensor, sample: int, hits: int, key: Tensor) -> Tensor:
    """The size that so many of a random sample reach, not less than the least positive number."""
    import tensorflow as tf

    # In the order in which they lie, and by XLA: else each would be waited for.
    drawn, _ = draw(key, sample, tensor.shape[0])
    sizes = in_one_loop(_sizes, tensor, drawn)
    hits = min(hits, sample)
    threshold = tf.reduce_min(tf.math.top_k(sizes, hits, sorted=False).values)
    # Where most elements are zero, so is the threshold; zeros are not worth sending.
    least = bits(tf.constant(np.finfo(tensor.dtype.as_numpy_dtype).tiny, tensor.dtype))
    return from_bits(tf.maximum(threshold, least))


def _sizes(tensor: Tensor, places: Tensor) -> Tensor:
    import tensorflow as tf

    return bits(tf.gather(tensor, places))
