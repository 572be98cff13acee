"""Test random numbers that depend only on a seed and on keys."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.network.compute_time import uniform, uniform_scalar


@pytest.mark.parametrize("seed", [0, 1, -3, 2**63 + 5, 2**70])
def test_one_number_is_that_of_the_column(seed: int) -> None:
    workers, steps = np.arange(50), np.arange(50)[::-1] * 1_000_003
    column = uniform(seed, 1, workers, steps).tolist()
    assert [
        uniform_scalar(seed, 1, *keys)
        for keys in zip(workers.tolist(), steps.tolist(), strict=True)
    ] == column
    assert min(column) < 0.1
    assert max(column) > 0.9
