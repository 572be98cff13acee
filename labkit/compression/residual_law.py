"""The conservation law of compressors with memory, which verification uses as a reference."""

from __future__ import annotations

import numpy as np


class ExpectedResidual:
    r"""A rank's expected residual: the sum of all gradients minus the sum of all sent tensors.

    \(e_T = \sum_t g_t - \sum_t s_t\), with gradients g and sent tensors s, is computed in float64
    without the compressor's state.
    """

    def __init__(self) -> None:
        self._sum: np.ndarray | float = 0.0

    def after(self, gradient: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """Return the expected residual after one more step; all arrays are (n,)."""
        residual: np.ndarray = self._sum + gradient.astype(np.float64) - sent
        self._sum = residual
        return residual
