"""All elements that are great enough."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.payload import Tensor
from labkit.compression.selection import Sparse, above


class Threshold(Sparse):
    r"""All elements with \(|g_i| \ge\) value: how many, the gradient decides.

    Args:
        value: the least size that is sent, in the units of the gradient.

    Source: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
    Interspeech 2015. Differs from it: elements are sent as they are, not as plus or minus the
    threshold; what is not sent is kept only under `ErrorFeedback`.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Strom 2015, Interspeech"

    value: float = Field(gt=0, kw_only=False)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The elements above the threshold: indices, int32 (k,), ascending, and values (k,)."""
        return above(tensor, self.value)
