"""Threshold sparsification: all elements above a fixed magnitude are sent."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from labkit.compression.payload import Tensor
from labkit.compression.selection import Sparse, select_above


class Threshold(Sparse):
    r"""Sends all elements with \(|g_i| \ge\) value; their number depends on the gradient.

    Args:
        value: The smallest magnitude that is sent, in the units of the gradient.

    Source: N. Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing,
    Interspeech 2015. Differs from it: elements are sent unchanged, not as plus or minus the
    threshold; only `ErrorFeedback` stores the unsent part.
    """

    family: ClassVar[str] = "sparsification"
    paper: ClassVar[str] = "Strom 2015, Interspeech"

    value: float = Field(gt=0, kw_only=False)

    def select(self, tensor: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elements above the threshold: indices, int32 (k,), ascending; values (k,)."""
        return select_above(tensor, self.value)
