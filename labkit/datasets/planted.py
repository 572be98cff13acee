"""Made data with an answer that is known: few columns that count, or a table of low rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from labkit.common.errors import InvalidInput

Array = NDArray[np.float64]


def correlated_columns(
    rows: int = 300,
    columns: int = 500,
    group: int = 10,
    correlation: float = 0.5,
    active: int = 10,
    noise: float = 0.3,
    seed: int = 0,
) -> tuple[Array, Array]:
    r"""Columns in groups that resemble each other, and a target that few of them make.

    \(x_j = \sqrt{c}\, s_{\lfloor j / g \rfloor} + \sqrt{1 - c}\, e_j\) with normal s and e, then
    of mean 0 and variance 1; \(y = X w + \sigma e\), of mean 0, where `active` weights are between
    1 and 3 in size, and the others 0.

    Args:
        rows, columns: of x.
        group: columns that share a part, g.
        correlation: c, of two columns of a group.
        active: columns that count.
        noise: σ.
        seed: of all draws.

    Returns:
        x (rows, columns) and y (rows, 1).

    Raises:
        InvalidInput: columns are not whole groups, more of them count than there are, or the
            correlation is none.
    """
    if columns % group or not 0 <= active <= columns or not 0 <= correlation <= 1:
        raise InvalidInput(
            f"columns={columns}, group={group}, active={active}, correlation={correlation}; "
            "columns must be a multiple of group and at least active, correlation from 0 to 1"
        )
    random = np.random.default_rng(seed)
    shared = np.repeat(random.standard_normal((rows, columns // group)), group, axis=1)
    ndarray = random.standard_normal((rows, columns))
    x = np.sqrt(correlation) * shared + np.sqrt(1 - correlation) * ndarray
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    weights = np.zeros(columns)
    sizes = random.choice([-1.0, 1.0], active) * random.uniform(1, 3, active)
    weights[random.choice(columns, active, replace=False)] = sizes
    y = x @ weights + noise * random.standard_normal(rows)
    return x, (y - y.mean())[:, None]


def ratings(
    users: int = 40,
    items: int = 30,
    approximation_rank: int = 3,
    observed: float = 0.5,
    noise: float = 0.1,
    seed: int = 0,
) -> tuple[Array, Array]:
    r"""Some entries of a table that is a product of two thin ones, \(R = U V^\top + \sigma e\).

    U and V are normal, so scaled that entries of R have variance 1.

    Args:
        users, items: rows and columns of the table.
        approximation_rank: columns of U and V.
        observed: share of the entries that are known; each user and each item has at least one.
        noise: σ.
        seed: of all draws.

    Returns:
        x (entries, 2), the user and the item of each, and y (entries, 1).
    """
    random = np.random.default_rng(seed)
    thin = [random.standard_normal((size, approximation_rank)) for size in (users, items)]
    table = thin[0] @ thin[1].T / np.sqrt(approximation_rank)
    table += noise * random.standard_normal(table.shape)
    known = random.random(table.shape) < observed
    known[np.arange(users), np.arange(users) % items] = True
    known[np.arange(items) % users, np.arange(items)] = True
    return np.argwhere(known).astype(float), table[known][:, None]


def lasso_optimum(x: Array, y: Array, l1: float) -> float:
    r"""The least of \(\tfrac1n \|y - X w\|^2 + \lambda \|w\|_1\), by scikit-learn's solver.

    Args:
        x: (rows, columns).
        y: (rows, 1).
        l1: λ.
    """
    from sklearn.linear_model import Lasso

    # scikit-learn's own objective is half of this one.
    solver = Lasso(alpha=l1 / 2, fit_intercept=False, tol=1e-14, max_iter=1_000_000)
    lasso = solver.fit(x, y[:, 0])
    rest = y[:, 0] - lasso.predict(x)
    return float(rest @ rest / len(x) + l1 * np.abs(lasso.coef_).sum())


def factorization_optimum(
    x: Array, y: Array, approximation_rank: int, l2: float, sweeps: int = 200, seed: int = 0
) -> float:
    r"""The least of \(\tfrac1n \sum (y - u_i \cdot v_j)^2 + \lambda(\|U\|^2 + \|V\|^2)\).

    By alternating least squares: all of U given V, solved exactly, then all of V given U.

    Args:
        x: (entries, 2), user and item.
        y: (entries, 1).
        approximation_rank: columns of U and V.
        l2: λ.
        sweeps: of both.
        seed: of what U and V begin with.

    Source: Y. Zhou, D. Wilkinson, R. Schreiber, R. Pan: Large-scale parallel collaborative
    filtering for the Netflix prize, AAIM 2008; there λ is multiplied by the entries of a row.
    """
    who, values, count = x.astype(int), y[:, 0], len(x)
    random, ridge = np.random.default_rng(seed), count * l2 * np.eye(approximation_rank)
    sizes = who.max(axis=0) + 1
    thin = [random.uniform(-0.5, 0.5, (size, approximation_rank)) for size in sizes]
    for _ in range(sweeps):
        for own, other in ((0, 1), (1, 0)):
            for row in range(sizes[own]):
                mine = who[:, own] == row
                beside = thin[other][who[mine, other]]
                square = beside.T @ beside + ridge
                thin[own][row] = np.linalg.solve(square, beside.T @ values[mine])
    rest = values - (thin[0][who[:, 0]] * thin[1][who[:, 1]]).sum(axis=1)
    return float(rest @ rest / count + l2 * sum(float((part**2).sum()) for part in thin))
