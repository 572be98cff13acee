"""Reader of the census table "adult": does a person earn more than 50,000 dollars a year?"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from labkit.common.options import Options
from labkit.datasets.dataset import Array, Arrays, DatasetSpec, Shapes, always
from labkit.datasets.files import DataFile

# `NUMERIC` contains the indices of the numeric columns; the other columns contain categories, such
# as workclass or education.
NUMERIC = (0, 2, 4, 10, 11, 12)  # age, weight, years of education, capital gain, loss, hours
LABEL = 14


def read_adult(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return the features and classes (0: <=50K, 1: >50K) of adult.data and adult.test.

    Numbers are standardised, and categories are one-hot encoded. Means and categories come from the
    whole training file, so that features do not depend on the option `rows`. A missing value, "?",
    is a separate category; a category that occurs only in the test file is encoded as zeros. The
    published files result in 108 features: 6 numeric ones and 102 categories.
    Reference: Becker & Kohavi 1996, doi:10.24432/C5XW20.
    """
    train, test = (_table(path) for path in paths)
    x_train, x_test = _features(train, test)
    return Arrays(x_train, _classes(train), x_test, _classes(test))


def _table(path: Path) -> Array:
    """Return a file's cells as text (rows, 15); omit blank lines and the test file's first line."""
    with path.open(encoding="ascii", newline="") as stream:
        rows = [row for row in csv.reader(stream, skipinitialspace=True) if len(row) == LABEL + 1]
    return np.array(rows)


def _classes(table: Array) -> Array:
    # Labels of the test file end in ".", as in ">50K.".
    return np.char.startswith(table[:, LABEL], ">50K")


def _features(train: Array, test: Array) -> tuple[Array, Array]:
    pairs = [
        standardised(train[:, column].astype(float), test[:, column].astype(float))
        if column in NUMERIC
        else one_hot(train[:, column], test[:, column])
        for column in range(LABEL)
    ]
    return np.hstack([pair[0] for pair in pairs]), np.hstack([pair[1] for pair in pairs])


def standardised(train: Array, test: Array) -> tuple[Array, Array]:
    """Scale a numeric column to mean 0 and standard deviation 1 over the training rows."""
    mean, deviation = train.mean(), train.std() or 1.0  # a constant column becomes zeros
    return (train[:, None] - mean) / deviation, (test[:, None] - mean) / deviation


def one_hot(train: Array, test: Array) -> tuple[Array, Array]:
    """One-hot encode a column, with one feature per category of the training rows."""
    categories = np.unique(train)
    return train[:, None] == categories, test[:, None] == categories


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
_CHECKSUMS = {
    "adult.data": "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
    "adult.test": "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
}
ADULT = DatasetSpec(
    read_adult,
    lambda options: Shapes((108,), 2, "classification"),
    always(32_561),
    tuple(DataFile("adult", name, f"{_UCI}/{name}", sha) for name, sha in _CHECKSUMS.items()),
)
