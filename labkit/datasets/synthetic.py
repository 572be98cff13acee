"""Synthetic data of any shape, generated with labels from a random teacher network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from labkit.common.errors import InvalidInput
from labkit.common.imports import optional
from labkit.common.options import Count
from labkit.datasets.dataset import Arrays, DatasetSpec, Rows, Shapes

ROWS = 1024  # A synthetic data set has `ROWS` training rows by default.
# The number of latent features, `LATENT`, is so small that 1000 rows suffice for learning.
LATENT = 16


class SyntheticOptions(Rows):
    """Options of the data set `synthetic`; rows default to 1024, test_rows to 256."""

    shape: tuple[Count, ...] = Field(
        (32,), min_length=1, description="shape of an example, such as [32] or [75, 75, 3]"
    )
    classes: int = Field(10, strict=True, ge=2, description="number of classes, 2 or more")
    targets: Count = Field(1, description="number of targets of a regression, 1 or more")
    task: Literal["classification", "regression"] = Field(
        "classification", description='"classification" or "regression"'
    )
    seed: int = Field(
        0, strict=True, ge=0, description="seed of the random numbers, a whole number of 0 or more"
    )

    @property
    def outputs(self) -> int:
        """The number of classes of a classification, or the number of targets of a regression."""
        return self.classes if self.task == "classification" else self.targets


def read_synthetic(options: SyntheticOptions, paths: Sequence[Path]) -> Arrays:
    """Return examples x = z M, with labels computed by a two-layer teacher network tanh(z A) B.

    The latent features z (rows, 16) are random normal. The entries of the matrices M, A and B are
    random normal. Every feature of x has variance 1. The class of a row is the index of the
    teacher's largest score. Regression targets are the teacher network's scores, standardised to
    mean 0 and variance 1.
    """
    rows, test_rows = options.rows or ROWS, options.test_rows or 256
    random = np.random.default_rng(options.seed)
    features = int(np.prod(options.shape))
    mixing = random.standard_normal((LATENT, features), np.float32) / np.float32(LATENT**0.5)
    # The division by the square root of the number of inputs keeps tanh nonlinear, but not
    # saturated.
    first = random.standard_normal((LATENT, 4 * LATENT), np.float32) / np.float32(LATENT**0.5)
    second = random.standard_normal((4 * LATENT, options.outputs), np.float32)
    # Training and test rows have labels from the same teacher network. The order of the random
    # draws must not change, because it determines the generated data.
    z = random.standard_normal((rows + test_rows, LATENT), np.float32)
    scores = np.tanh(z @ first) @ second
    x = (z @ mixing).reshape(-1, *options.shape)
    if options.task == "classification":
        y = scores.argmax(axis=1)
    else:
        y = (scores - scores.mean(axis=0)) / scores.std(axis=0)
    return Arrays(x[:rows], y[:rows], x[rows:], y[rows:])


SYNTHETIC = DatasetSpec(
    read_synthetic,
    lambda options: Shapes(options.shape, options.outputs, options.task),
    lambda options: options.rows or ROWS,
    options=SyntheticOptions,
)


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
    r"""Return features in correlated groups, and a target that depends on few of the features.

    Column j is \(x_j = \sqrt{c}\, s_{\lfloor j / g \rfloor} + \sqrt{1 - c}\, e_j\), with
    correlation c and group size g. The random variables s and e are standard normal. The columns of
    x are then standardised to mean 0 and variance 1. The target \(y = X w + \sigma e\) has mean 0.
    The vector w has `active` weights with absolute values between 1 and 3; its other weights are 0.

    Args:
        rows, columns: Numbers of rows and columns of x.
        group: Number g of columns in one group of correlated columns.
        correlation: Correlation c of two columns in the same group.
        active: Number of columns of x on which the target y depends.
        noise: Standard deviation σ of the noise.
        seed: Seed of the random numbers.

    Returns:
        The features x (rows, columns), and the target y (rows, 1).

    Raises:
        InvalidInput: `columns` is not a multiple of `group`, or another argument is out of range.
            The argument `active` ranges from 0 to `columns`. The argument `correlation` ranges from
            0 to 1.
    """
    if columns % group or not 0 <= active <= columns or not 0 <= correlation <= 1:
        raise InvalidInput(
            f"columns={columns}, group={group}, active={active}, correlation={correlation}: give "
            "columns that are a multiple of group and at least active, and a correlation from 0 "
            "to 1"
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
    r"""Return the known entries of a low-rank table with noise, \(R = U V^\top + \sigma e\).

    The entries of U and V are normally distributed. Without noise, the entries of R have a variance
    of 1.

    Args:
        users, items: Number of rows (users) and number of columns (items) of the table.
        approximation_rank: Number of columns of U and V.
        observed: Fraction of entries that are known; each user and each item has at least one
            known entry.
        noise: Standard deviation σ of the noise.
        seed: Seed of the random numbers.

    Returns: The array x (entries, 2) contains the user and item of each known entry. The array y
        (entries, 1) contains the value of each known entry.
    """
    random = np.random.default_rng(seed)
    matrices = [random.standard_normal((size, approximation_rank)) for size in (users, items)]
    table = matrices[0] @ matrices[1].T / np.sqrt(approximation_rank)
    table += noise * random.standard_normal(table.shape)
    known = random.random(table.shape) < observed
    known[np.arange(users), np.arange(users) % items] = True
    known[np.arange(items) % users, np.arange(items)] = True
    return np.argwhere(known).astype(float), table[known][:, None]


def lasso_optimum(x: Array, y: Array, l1: float) -> float:
    r"""Return the minimal value of \(\tfrac1n \|y - X w\|^2 + \lambda \|w\|_1\), found by Lasso.

    Args:
        x: Features (rows, columns).
        y: Targets (rows, 1).
        l1: Factor λ of the L1 penalty.
    """
    linear_model = optional("sklearn.linear_model")
    # scikit-learn's objective is half of the objective in the docstring, so λ is halved.
    solver = linear_model.Lasso(alpha=l1 / 2, fit_intercept=False, tol=1e-14, max_iter=1_000_000)
    lasso = solver.fit(x, y[:, 0])
    rest = y[:, 0] - lasso.predict(x)
    return float(rest @ rest / len(x) + l1 * np.abs(lasso.coef_).sum())


def factorization_optimum(
    x: Array, y: Array, approximation_rank: int, l2: float, sweeps: int = 200, seed: int = 0
) -> float:
    r"""Return a minimum of \(\tfrac1n \sum (y - u_i \cdot v_j)^2 + \lambda(\|U\|^2 + \|V\|^2)\).

    The method is alternating least squares. Each iteration solves for U with V fixed, and then for
    V with U fixed.

    Args:
        x: User and item of each known entry (entries, 2).
        y: Values of the known entries (entries, 1).
        approximation_rank: Number of columns of U and V.
        l2: Factor λ of the L2 penalty.
        sweeps: Number of iterations; each solves for U and for V.
        seed: Seed of the initial U and V.

    Reference: Y. Zhou, D. Wilkinson, R. Schreiber, R. Pan: Large-scale parallel collaborative
    filtering for the Netflix prize, AAIM 2008. In Zhou et al. 2008, the λ of each user or item is
    multiplied by the number of its known entries; in labkit, λ is the same for all.
    """
    indices, values, count = x.astype(int), y[:, 0], len(x)
    random, ridge = np.random.default_rng(seed), count * l2 * np.eye(approximation_rank)
    sizes = indices.max(axis=0) + 1
    matrices = [random.uniform(-0.5, 0.5, (size, approximation_rank)) for size in sizes]
    for _ in range(sweeps):
        for side, other in ((0, 1), (1, 0)):
            for row in range(sizes[side]):
                of_row = indices[:, side] == row
                factors = matrices[other][indices[of_row, other]]
                square = factors.T @ factors + ridge
                matrices[side][row] = np.linalg.solve(square, factors.T @ values[of_row])
    rest = values - (matrices[0][indices[:, 0]] * matrices[1][indices[:, 1]]).sum(axis=1)
    return float(rest @ rest / count + l2 * sum(float((part**2).sum()) for part in matrices))
