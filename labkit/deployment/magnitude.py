"""The weights of smallest magnitude: which they are, and how they become zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import keras

Scope = Literal["layer", "global"]


def kernels(model: keras.Model) -> list[keras.Variable]:
    """The trainable variables that are kernels, recurrent and depthwise ones among them."""
    return [weight for weight in model.trainable_variables if weight.name.endswith("kernel")]


def smallest(
    weights: Sequence[keras.Variable], sparsity: float, scope: Scope
) -> list[NDArray[np.bool_]]:
    """Where the weights of smallest magnitude are; exactly round(sparsity n) are True.

    Args:
        weights: variables of any shapes.
        sparsity: share to choose, 0 to 1.
        scope: "layer": of each variable; "global": of all together.
    """
    magnitudes = [np.abs(weight.numpy()).astype(np.float64).ravel() for weight in weights]
    if scope == "global":
        chosen = _smallest(np.concatenate(magnitudes), sparsity)
        ends = np.cumsum([len(part) for part in magnitudes])
        parts = np.split(chosen, ends[:-1])
    else:
        parts = [_smallest(part, sparsity) for part in magnitudes]
    return [part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def set_to_zero(weights: Sequence[keras.Variable], where: Sequence[NDArray[np.bool_]]) -> None:
    """Put zeros into variables: positive ones, for -0.0 would not be left out of a file."""
    for weight, gone in zip(weights, where, strict=True):
        values = weight.numpy()
        weight.assign(np.where(gone, np.zeros((), values.dtype), values))


def _smallest(magnitudes: NDArray[np.float64], sparsity: float) -> NDArray[np.bool_]:
    count = round(sparsity * len(magnitudes))
    chosen = np.zeros(len(magnitudes), bool)
    chosen[np.argsort(magnitudes, kind="stable")[:count]] = True  # of equals, the first
    return chosen
