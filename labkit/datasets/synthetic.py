"""Made data of any shape, labelled by a random teacher: no file, no network, and learnable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from labkit.common.options import Count
from labkit.datasets.dataset import Arrays, DatasetSpec, Rows, Shapes

ROWS = 1024  # that train, where nobody says how many
LATENT = 16  # few hidden factors, so that a thousand rows suffice to learn even large images


class SyntheticOptions(Rows):
    """Options of `synthetic`; rows default to 1024, test_rows to 256."""

    shape: tuple[Count, ...] = Field(
        (32,), min_length=1, description="shape of an example, such as [32] or [75, 75, 3]"
    )
    classes: int = Field(10, strict=True, ge=2, description="number of classes, 2 or more")
    targets: Count = Field(1, description="number of targets of a regression, 1 or more")
    task: Literal["classification", "regression"] = Field(
        "classification", description='"classification" or "regression"'
    )
    seed: int = Field(0, strict=True, ge=0, description="whole number, 0 or more")

    @property
    def outputs(self) -> int:
        """Classes or targets, as the task has it."""
        return self.classes if self.task == "classification" else self.targets


def read_synthetic(options: SyntheticOptions, paths: Sequence[Path]) -> Arrays:
    """Return examples x = z M and labels of a two-layer teacher, tanh(z A) B, of the same z.

    z (rows, 16), M, A and B are normal; every feature has variance 1. Classes are the teacher's
    largest score, targets its scores with mean 0 and variance 1.
    """
    rows, test_rows = options.rows or ROWS, options.test_rows or 256
    random = np.random.default_rng(options.seed)
    features = int(np.prod(options.shape))
    mixing = random.standard_normal((LATENT, features), np.float32) / np.float32(LATENT**0.5)
    # Divided by the root of the inputs, so that tanh neither saturates nor is a straight line.
    first = random.standard_normal((LATENT, 4 * LATENT), np.float32) / np.float32(LATENT**0.5)
    second = random.standard_normal((4 * LATENT, options.outputs), np.float32)
    # Drawn together, so that test rows are of the same teacher; the order of draws is part of the
    # data.
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
