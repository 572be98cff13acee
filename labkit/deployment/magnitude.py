"""The weights of smallest magnitude in a model's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import keras


Scope = Literal["layer", "global"]


def kernels(model: keras.Model) -> list[keras.Variable]:
    """Return the trainable kernels of a model, including recurrent and depthwise kernels."""
    return [weight for weight in model.trainable_variables if weight.name.endswith("kernel")]


def smallest(
    weights: Sequence[keras.Variable], sparsity: float, scope: Scope
) -> list[NDArray[np.bool_]]:
    """Return masks that select the round(sparsity * n) smallest of n weights by magnitude.

    Args:
        weights: Variables to select from, of any shapes.
        sparsity: Fraction of the weights to select, from 0 to 1.
        scope: "layer" selects the fraction `sparsity` of each variable. "global" selects the
            fraction `sparsity` of the weights of all variables together.
    """
    magnitudes = [np.abs(weight.numpy()).astype(np.float64).ravel() for weight in weights]
    if scope == "global":
        chosen = _smallest(np.concatenate(magnitudes), sparsity)
        boundaries = np.cumsum([len(part) for part in magnitudes])
        parts = np.split(chosen, boundaries[:-1])
    else:
        parts = [_smallest(part, sparsity) for part in magnitudes]
    return [part.reshape(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def set_to_zero(weights: Sequence[keras.Variable], masks: Sequence[NDArray[np.bool_]]) -> None:
    """Set masked weights to +0.0, because a sparse file would store -0.0 as a nonzero value."""
    for weight, pruned in zip(weights, masks, strict=True):
        values = weight.numpy()
        weight.assign(np.where(pruned, np.zeros((), values.dtype), values))


def _smallest(magnitudes: NDArray[np.float64], sparsity: float) -> NDArray[np.bool_]:
    count = round(sparsity * len(magnitudes))
    chosen = np.zeros(len(magnitudes), bool)
    # Among weights of equal magnitude, the first ones are selected.
    chosen[np.argsort(magnitudes, kind="stable")[:count]] = True
    return chosen
