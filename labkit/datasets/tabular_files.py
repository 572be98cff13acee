"""Reader of .csv and .parquet tables, which rejects columns that would be misread."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.options import Options
from labkit.datasets.dataset import (
    FEW_CLASSES,
    Array,
    Arrays,
    DataFile,
    DatasetSpec,
    Shapes,
    always,
)

if TYPE_CHECKING:
    import pandas as pd


# The tuple `NUMERIC` contains the indices of the numeric columns. The other columns contain
# categories, such as workclass or education. The numeric columns are age, sampling weight,
# education years, capital gain, capital loss and hours per week.
NUMERIC = (0, 2, 4, 10, 11, 12)
LABEL = 14


def read_adult(options: Options, paths: Sequence[Path]) -> Arrays:
    """Return the features and classes (0: <=50K, 1: >50K) of adult.data and adult.test.

    Numbers are standardised, and categories are one-hot encoded. Means and categories come from the
    whole training file. Features therefore do not depend on the option `rows`. A missing value,
    "?", is a separate category. A category that occurs only in the test file is encoded as zeros.
    The published files result in 108 features: 6 numeric ones and 102 categories.
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
    # With the divisor 1.0, a constant column becomes zeros instead of NaN.
    mean, deviation = train.mean(), train.std() or 1.0
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


# A text column may have at most `CATEGORIES` categories, each of which becomes a feature.
CATEGORIES = 1000
SEPARATORS = ",;\t|"
# The reader detects the separator and the decimal sign in the first `START` characters of the file.
START = 1 << 16


def read_table(path: Path) -> pd.DataFrame:
    """Read a .parquet file, or a .csv file with commas, semicolons, tabs or "|" as separators.

    Raises:
        InvalidInput: The file cannot be read, has no header, or has rows longer than its header.
    """
    import pandas as pd

    try:
        if path.suffix != ".csv":
            return pd.read_parquet(path)
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            start = file.read(START)
        header = start.partition("\n")[0]
        separator = max(SEPARATORS, key=header.count)
        # A comma can be a decimal sign only if semicolons separate the columns.
        decimal = "," if separator == ";" and re.search(r"\d,\d", start) else "."
        # pandas only warns about dropped fields; labkit turns the warning into an error.
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, sep=separator, decimal=decimal, index_col=False)
    except (ValueError, OSError, pd.errors.ParserWarning) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if numbers := [name for name in table.columns if re.fullmatch(r"-?\d+\.\d+", str(name))]:
        raise InvalidInput(
            f"{path} has the number {numbers[0]} as a column name: write the names of the "
            "columns in the first line"
        )
    return table


def features_of(name: str, train: pd.Series, test: pd.Series) -> tuple[Array, Array]:
    """Return a column's features; the mean replaces missing numbers; missing texts are a category.

    Raises:
        InvalidInput: The column has infinite numbers, dates, numbers stored as texts, or too many
            distinct texts.
    """
    if isinstance(train.iloc[0], list | np.ndarray):
        return np.stack(list(train)), np.stack(list(test))
    kind, column = train.dtype.kind, f"column {train.name!r}"
    if kind in "iufb":
        # A pandas column of nullable integers cannot store a mean, which may be fractional.
        if not isinstance(train.dtype, np.dtype):
            train, test = train.astype("Float64"), test.astype("Float64")
        mean = train.mean() if train.notna().any() else 0.0
        numbers = [part.fillna(mean).to_numpy(float) for part in (train, test)]
        if infinite := sum(int(np.isinf(part).sum()) for part in numbers):
            raise InvalidInput(
                f"{name} has {infinite} infinite values in {column}: leave these cells empty to "
                "use the column's mean, or drop their rows"
            )
        return standardised(*numbers)
    if kind in "mM":
        raise InvalidInput(
            f"{name} has dates in {column}: convert the dates to numbers, or drop the column"
        )
    _check_texts(name, train)
    # A text column is rejected if most of its texts are distinct, because such texts only identify
    # rows.
    distinct, allowed = train.nunique(), max(FEW_CLASSES, len(train) // 2)
    if distinct > (allowed := CATEGORIES if distinct > CATEGORIES else allowed):
        raise InvalidInput(
            f"{name} has {distinct:,} distinct texts in {column}, and each text would become a "
            f"feature; allowed are at most {allowed:,}: convert the texts to numbers, or drop "
            "the column"
        )
    return one_hot(*(part.astype(str).to_numpy(str) for part in (train, test)))


def _check_texts(name: str, column: pd.Series) -> None:
    """Raise an error if a text column contains numbers, which would become categories."""
    import pandas as pd

    texts = column.dropna().astype(str)
    # Numbers with commas are rejected, because a comma may separate either decimals or thousands.
    numbers = pd.to_numeric(texts.str.replace(",", "."), errors="coerce").notna()
    if len(texts) and numbers.mean() >= 0.5:
        odd = texts[~numbers] if not numbers.all() else texts
        raise InvalidInput(
            f"{name} has numbers as texts in column {column.name!r}, such as {odd.iloc[0]!r}: "
            "write numbers with a decimal point, and leave the cells of missing numbers empty"
        )
