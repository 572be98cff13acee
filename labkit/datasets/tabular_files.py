"""Reader of .csv and .parquet tables, which rejects columns that would be misread."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.datasets.adult import one_hot, standardised
from labkit.datasets.dataset import Array
from labkit.datasets.values import FEW_CLASSES

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = 1000  # maximum per text column, because each category is a feature
SEPARATORS = ",;\t|"
START = 1 << 16  # characters read to detect separator and decimal sign


def read_table(path: Path) -> pd.DataFrame:
    """Read a .csv or .parquet file; columns are separated by commas, semicolons, tabs or bars.

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
        with warnings.catch_warnings():  # turns pandas' warning about dropped fields into an error
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
    """Return a column as features; the mean replaces missing numbers; missing texts are a category.

    Raises:
        InvalidInput: The column has infinite numbers, dates, numbers as texts, or a different text
            in most rows.
    """
    if isinstance(train.iloc[0], list | np.ndarray):
        return np.stack(list(train)), np.stack(list(test))
    kind, column = train.dtype.kind, f"column {train.name!r}"
    if kind in "iufb":
        # A column of nullable integers cannot store a mean.
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
    # A column with a different text in most rows is rejected, because such texts only identify
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
    # Numbers with commas are rejected and not converted, because a comma may separate decimals or
    # thousands.
    numbers = pd.to_numeric(texts.str.replace(",", "."), errors="coerce").notna()
    if len(texts) and numbers.mean() >= 0.5:
        odd = texts[~numbers] if not numbers.all() else texts
        raise InvalidInput(
            f"{name} has numbers as texts in column {column.name!r}, such as {odd.iloc[0]!r}: "
            "write numbers with a decimal point, and leave the cells of missing numbers empty"
        )
