"""Synthetic data of any shape, generated with labels from a random teacher network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from labkit.common.options import Count
from labkit.datasets.dataset import Arrays, DatasetSpec, Rows, Shapes

ROWS = 1024  # default number of training rows
LATENT = 16  # number of latent features; with so few, 1000 rows suffice


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
        """Number of classes or targets, depending on the task."""
        return self.classes if self.task == "classification" else self.targets


def read_synthetic(options: SyntheticOptions, paths: Sequence[Path]) -> Arrays:
    """Return examples x = z M, and labels that a two-layer teacher network, tanh(z A) B, gives z.

    The entries of the latent features z (rows, 16) and of the matrices M, A and B are random
    normal; every feature of x has variance 1. The class of a row is the index of the teacher's
    largest score. Regression targets are the teacher network's scores, standardised to mean 0 and
    variance 1.
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
