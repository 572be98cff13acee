"""Random-k sparsification: ranks send random elements, at the same indices on all ranks."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor
from labkit.compression.selection import count, draw, scatter


class RandomK(Compressor):
    r"""Sends one random element from each of k equal ranges, at the same indices on all ranks.

    The number of sent elements is \(k = \max(1, \mathrm{round}(\mathrm{ratio} \cdot n))\) of n.
    Only values are sent, without indices, and an allreduce sums the values. Without `rescale`, the
    expectation of the decoded tensor is \(E\,\hat g = \frac{k}{n} g\), which is suitable for
    `ErrorFeedback`. With `rescale`, \(\hat g_i = \frac{n}{k} g_i\) for selected elements. Then
    \(E\,\hat g = g\) and \(E \|\hat g - g\|^2 = (\frac{n}{k} - 1) \|g\|^2\); the product of n/k and
    an element must not overflow. NaN in elements that are not selected remains undetected.

    Args:
        ratio: The fraction of elements that are sent.
        rescale: Whether sent elements are multiplied by n/k, so that the expectation of the decoded
            tensor is the gradient.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599; rescaled: J. Wangni, J. Wang, J. Liu, T. Zhang, Gradient Sparsification for
    Communication-Efficient Distributed Optimization, 2017, arXiv 1710.09854. Differs from them: one
    element of each range is sent instead of any k elements, with the same expectation; if k does
    not divide n, the lengths of ranges differ by one, and each selected element is scaled by the
    length of its range.
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
        """Whether the expectation of the decoded tensor is the encoded tensor."""
        return self.rescale

    @property
    def expansive(self) -> bool:
        """Whether sent elements are multiplied by n/k, so that the error can exceed the tensor."""
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
        """Return a dense tensor (n,): the values at their indices, and zeros at all others."""
        import tensorflow as tf

        values, n = payload["values"], payload["length"][0]
        indices, _ = draw(payload["key"], tf.size(values), n)
        return scatter(indices, values, n)
