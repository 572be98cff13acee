"""Counter-based random numbers, which depend only on a seed and keys, equally in all processes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MOST = 2**64 - 1


def uniform(seed: int, *keys: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Return random numbers in [0, 1) that depend only on the seed and the keys.

    Source: the generator splitmix64, Steele et al. 2014.
    """
    state = np.array([seed % 2**64], np.uint64)
    for key in keys:
        state = state + np.uint64(0x9E3779B97F4A7C15) + np.asarray(key).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def uniform_scalar(seed: int, *keys: int) -> float:
    """Return the same number as `uniform` for scalar keys, but a few times faster."""
    state = seed & _MOST
    for key in keys:
        state = (state + 0x9E3779B97F4A7C15 + (key & _MOST)) & _MOST
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MOST
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MOST
        state ^= state >> 31
    return (state >> 11) * 2.0**-53
