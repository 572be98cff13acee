"""Scheduled blocks: the lasso's optimum, a factorization's, layers of a network, and what is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Lasso

import labkit as lk
from labkit.common.errors import InvalidInput
from labkit.strategies.scheduled_blocks import ScheduledBlocks

ROWS, COLUMNS, ALPHA = 90, 30, 0.1


def correlated(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Columns of unit variance in groups of five, and what three of them give."""
    random = np.random.default_rng(seed)
    shared = np.repeat(random.standard_normal((ROWS, COLUMNS // 5)), 5, axis=1)
    x = np.sqrt(0.5) * shared + np.sqrt(0.5) * random.standard_normal((ROWS, COLUMNS))
    x = (x - x.mean(0)) / x.std(0)
    y = x[:, [2, 11, 27]] @ [3.0, -2.0, 1.0] + 0.3 * random.standard_normal(ROWS)
    return x, (y - y.mean())[:, None]


def linear() -> Any:
    import keras

    zeros = {"use_bias": False, "kernel_initializer": "zeros"}
    return keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1, **zeros)])


def lasso(strategy: ScheduledBlocks, rounds: int, **fields: Any) -> lk.Experiment:
    asked: dict[str, Any] = {"clock": "virtual", "compute": lk.ComputeTime(0.01)} | fields
    return lk.Experiment(
        model=linear,
        dataset=correlated(),
        loss="mse",
        metrics=["mae"],
        optimizer="sgd",
        learning_rate=0.5,
        batch_size=ROWS,
        epochs=rounds,
        workers=3,
        precision="float64",
        strategy=strategy,
        **asked,
    )


@pytest.mark.parametrize("select", ["priority", "round_robin", "random"])
def test_the_lasso_reaches_the_optimum_of_coordinate_descent(
    cluster: lk.Cluster, select: Any
) -> None:
    strategy = ScheduledBlocks(select, block=1, parallel=4, dependency=0.4, l1=2 * ALPHA)
    run = cluster.run(lasso(strategy, 400), show=False)
    x, y = correlated()
    solver = Lasso(alpha=ALPHA, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(x, y[:, 0])
    found = run.model().get_weights()[0][:, 0]
    np.testing.assert_allclose(found, solver.coef_, rtol=0, atol=1e-6)
    assert 3 <= np.count_nonzero(found) < COLUMNS
    # History has the whole objective: twice that of the solver.
    objective = np.mean((y[:, 0] - x @ found) ** 2) + 2 * ALPHA * np.abs(found).sum()
    last = run.history[run.history.step == 399]
    assert np.average(last.loss, weights=last.samples) == pytest.approx(objective, abs=1e-9)
