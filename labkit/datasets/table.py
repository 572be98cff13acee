"""Read tables as spreadsheets, databases and pandas write them, and refuse columns that mislead."""

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

CATEGORIES = 1000  # of a column of texts; each is a feature
SEPARATORS = ",;\t|"
START = 1 << 16  # characters that tell how a file is written


def read_table(path: Path) -> pd.DataFrame:
    """A .csv or .parquet file; commas, semicolons, tabs or bars between columns.

    Raises:
        InvalidInput: it cannot be read, has no header, or has longer rows than its header.
    """
    import pandas as pd

    try:
        if path.suffix != ".csv":
            return pd.read_parquet(path)
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            start = file.read(START)
        header = start.partition("\n")[0]
        separator = max(SEPARATORS, key=header.count)
        # As it is written where commas are in numbers.
        decimal = "," if separator == ";" and re.search(r"\d,\d", start) else "."
        with warnings.catch_warnings():  # pandas only warns when it drops fields
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, sep=separator, decimal=decimal, index_col=False)
    except (ValueError, OSError, pd.errors.ParserWarning) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error
    if numbers := [name for name in table.columns if re.fullmatch(r"-?\d+\.\d+", str(name))]:
        raise InvalidInput(
            f"{path} has the number {numbers[0]} as a column's name: give names in the first line"
        )
    return table


def features_of(name: str, train: pd.Series, test: pd.Series) -> tuple[Array, Array]:
    """A column as features; what is missing is the mean of the others, or a text of its own.

    Raises:
        InvalidInput: the column holds infinite numbers, dates, numbers as texts, or names of rows.
    """
    if isinstance(train.iloc[0], list | np.ndarray):
        return np.stack(list(train)), np.stack(list(test))
    kind, column = train.dtype.kind, f"column {train.name!r}"
    if kind in "iufb":
        if not isinstance(train.dtype, np.dtype):  # a mean fits none of pandas's whole numbers
            train, test = train.astype("Float64"), test.astype("Float64")
        mean = train.mean() if train.notna().any() else 0.0
        numbers = [part.fillna(mean).to_numpy(float) for part in (train, test)]
        if infinite := sum(int(np.isinf(part).sum()) for part in numbers):
            raise InvalidInput(
                f"{name} has {infinite} infinite values in {column}: leave them empty, which takes "
                "the mean, or drop their rows"
            )
        return standardised(*numbers)
    if kind in "mM":
        raise InvalidInput(f"{name} has dates in {column}: make numbers of them, or drop it")
    _check_texts(name, train)
    # Where most rows have a text of their own, it names them.
    distinct, allowed = train.nunique(), max(FEW_CLASSES, len(train) // 2)
    if distinct > (allowed := CATEGORIES if distinct > CATEGORIES else allowed):
        raise InvalidInput(
            f"{name} has {distinct:,} distinct texts in {column}, and each would be a "
            f"feature; allowed: {allowed:,}: make numbers of them, or drop the column"
        )
    return one_hot(*(part.astype(str).to_numpy(str) for part in (train, test)))


def _check_texts(name: str, column: pd.Series) -> None:
    """Refuse numbers among texts, each of which would become a category."""
    import pandas as pd

    texts = column.dropna().astype(str)
    # Only the user knows whether a comma separates decimals or thousands.
    numbers = pd.to_numeric(texts.str.replace(",", "."), errors="coerce").notna()
    if len(texts) and numbers.mean() >= 0.5:
        odd = texts[~numbers] if not numbers.all() else texts
        raise InvalidInput(
            f"{name} has numbers as texts in column {column.name!r}, such as {odd.iloc[0]!r}: "
            "write numbers with a point, and leave missing ones empty"
        )
