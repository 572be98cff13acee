"""Random numbers that depend on a seed and on keys alone, in any order and any process."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def uniform(seed: int, *keys: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) that depend on seed and keys alone (splitmix64; Steele et al. 2014)."""
    state = np.array([seed % 2**64], np.uint64)
    for key in keys:
        state = state + np.uint64(0x9E3779B97F4A7C15) + np.asarray(key).astype(np.uint64)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    numbers: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
