"""Export of runs to a table with one row per run and columns for parameters and metrics."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.canonical_json import is_number
from labkit.common.errors import InvalidInput
from labkit.common.privacy import scrub
from labkit.common.terminal import plain
from labkit.records.export.fields import require_runs
from labkit.records.run import Run, to_dataframe
from labkit.records.store import write_atomically

if TYPE_CHECKING:
    import pandas

KINDS = (".csv", ".parquet")


def export(runs: Iterable[Run], path: Path | str, kind: str | None = None) -> Path:
    """Write a CSV or Parquet table with one row per run, and return the path of its file.

    The argument `kind` (".csv" or ".parquet") defines the format; if it is None, the suffix of the
    path does.

    The columns are those of `lk.to_dataframe`, with paths and machine names removed from the texts.
    A column with both texts and numbers is written as text, because Parquet columns have one type.

    Raises:
        InvalidInput: If the format of the file is neither CSV nor Parquet.
        LabkitError: If the argument contains no runs.
    """
    path = Path(path)
    kind = kind or path.suffix.lower()
    if kind not in KINDS:
        raise InvalidInput(f"{path.name} ends in neither {' nor '.join(KINDS)}: rename the file")
    table = to_dataframe(require_runs(runs))
    table = table.assign(**{name: _column(table[name]) for name in table.columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".csv":
        texts = table.select_dtypes("string")
        table = table.assign(**{name: texts[name].map(_quoted) for name in texts})
        return write_atomically(path, table.rename(columns=_quoted).to_csv(index=False))
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return write_atomically(path, content.getvalue())


def _quoted(text: str) -> str:
    """Return a text; start it with an apostrophe if a spreadsheet would read it as a formula."""
    risky = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
    # `plain` escapes carriage returns, because pandas does not quote them, and some programs read
    # them as ends of rows.
    return plain(f"'{text}" if risky else text) if isinstance(text, str) else text


def _column(values: pandas.Series) -> pandas.Series:
    """Return a column with values of one type, from which paths and machine names are removed."""
    import pandas as pd

    present = values.dropna()
    kinds = {"number" if is_number(value) else type(value).__name__ for value in present}
    if kinds == {"number"}:
        return pd.to_numeric(values)
    if kinds == {"bool"}:
        return values.astype("boolean")
    # Each distinct text is cleaned only once, because even a thousand runs contain few different
    # texts.
    text = {value: scrub(str(value)) for value in present.unique()}
    return values.map(text).astype("string")
