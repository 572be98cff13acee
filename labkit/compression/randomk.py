"""Elements drawn at random, the same on all ranks."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.compressor import Compressor
from labkit.compression.payload import Payload, Tensor
from labkit.compression.selection import count, draw, scatter


class RandomK(Compressor):
    r"""One element of each of k equal pieces, the same on all ranks.

    \(k = \max(1, \mathrm{round}(\mathrm{ratio} \cdot n))\). Only values travel, and are summed
    on the way. As it is, \(E\,\hat g = \frac{k}{n} g\), which is what `ErrorFeedback` wants; with
    `rescale`, \(\hat g_i = \frac{n}{k} g_i\) where drawn, \(E\,\hat g = g\) and
    \(E \|\hat g - g\|^2 = (\frac{n}{k} - 1) \|g\|^2\); n/k times an element must be a float. An
    element that is not drawn is not looked at, though it be NaN.

    Args:
        ratio: of the elements, how many are sent.
        rescale: make the expectation that of the gradient.

    Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, 2018, arXiv
    1809.07599; rescaled: J. Wangni, J. Wang, J. Liu, T. Zhang, Gradient Sparsification for
    Communication-Efficient Distributed Optimization, 2017, arXiv 1710.09854. Differs from them:
    one element of each piece instead of any k, with the same expectation; where k does not
    divide n, pieces differ by one element, and each is scaled by its own length.
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
        """The expectation of what is decoded is what was encoded."""
        return self.rescale

    @property
    def expansive(self) -> bool:
        """n/k times an element is sent."""
        return self.rescale

    def encode(self, tensor: Tensor, key: Tensor) -> Payload:
        """Parts "values" (k,), "key" of the draw, int32 (2,), and "length", int32 (1,)."""
        import tensorflow as tf

        n = tensor.shape[0]
        indices, pieces = draw(key, count(self.ratio, n), n)
        values = tf.gather(tensor, indices)
        if self.rescale:
            values *= tf.cast(pieces, values.dtype)
        return {"values": values, "key": key, "length": tf.constant([n])}

    def decode(self, payload: Payload) -> Tensor:
        """The values where they were drawn, else zero, (n,)."""
        import tensorflow as tf

        values, n = payload["values"], payload["length"][0]
        indices, _ = draw(payload["key"], tf.size(values), n)
        return scatter(indices, values, n)
