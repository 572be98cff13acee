"""The law of what a compressor has not sent yet, in books of one's own."""

from __future__ import annotations

import numpy as np


class Waiting:
    r"""What waits on a rank is all that was given, less all that was sent.

    \(e_T = \sum_t g_t - \sum_t s_t\), kept in float64, without looking at the compressor's memory.
    """

    def __init__(self) -> None:
        self._sum: np.ndarray | float = 0.0

    def after(self, given: np.ndarray, sent: np.ndarray) -> np.ndarray:
        """What must wait after one more step; all of them (n,)."""
        found: np.ndarray = self._sum + given.astype(np.float64) - sent
        self._sum = found
        return found
