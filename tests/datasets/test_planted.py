"""Test generated data with known answers: their properties, and the optima of their solvers."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.common.errors import InvalidInput
from labkit.datasets.synthetic import (
    correlated_columns,
    factorization_optimum,
    lasso_optimum,
    ratings,
)


def test_columns_of_a_group_resemble_each_other_and_no_others() -> None:
    x, y = correlated_columns(4000, 20, group=5, correlation=0.6, active=3)
    found = x.T @ x / len(x)
    same = np.kron(np.eye(4), np.ones((5, 5))).astype(bool)
    np.testing.assert_allclose(np.diag(found), 1)
    np.testing.assert_allclose(found[same & ~np.eye(20, dtype=bool)], 0.6, atol=0.06)
    np.testing.assert_allclose(found[~same], 0, atol=0.06)
    assert y.shape == (4000, 1)
    assert abs(y.mean()) < 1e-12


@pytest.mark.parametrize("wrong", [{"columns": 25}, {"active": 600}, {"correlation": 1.5}])
def test_what_cannot_be_made_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match="that are a multiple of group"):
        correlated_columns(10, **({"columns": 500} | wrong))


def test_nothing_near_the_lassos_optimum_is_lower() -> None:
    x, y = correlated_columns(60, 20, active=3)
    least = lasso_optimum(x, y, l1=0.2)
    # Proximal gradient steps approach the same value from above.
    weights, rate = np.zeros(20), 0.5 / np.linalg.norm(x.T @ x / 60, 2)
    for _ in range(20_000):
        moved = weights - rate * 2 / 60 * x.T @ (x @ weights - y[:, 0])
        weights = np.sign(moved) * np.maximum(np.abs(moved) - rate * 0.2, 0)
    rest = x @ weights - y[:, 0]
    assert rest @ rest / 60 + 0.2 * np.abs(weights).sum() == pytest.approx(least, rel=1e-9)


def test_everybody_has_rated_and_was_rated() -> None:
    x, y = ratings(12, 9, observed=0.1)
    assert set(x[:, 0]) == set(range(12))
    assert set(x[:, 1]) == set(range(9))
    assert len(x) == len(y) == len(np.unique(x, axis=0))


def test_a_table_without_gaps_is_factored_as_its_singular_values_say() -> None:
    """Without a penalty, the optimum omits the smallest singular values (Eckart, Young, 1936)."""
    x, y = ratings(10, 8, approximation_rank=4, observed=1.0, noise=0.5)
    values = np.linalg.svd(y.reshape(10, 8), compute_uv=False)
    least = factorization_optimum(x, y, 2, l2=0.0, sweeps=2000)
    assert least == pytest.approx((values[2:] ** 2).sum() / 80, rel=1e-6)
