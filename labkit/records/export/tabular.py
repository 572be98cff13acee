"""Export of runs as one table: one row per run, with parameters and metrics as columns."""

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
    """Write a table with one row per run as CSV or Parquet, and return its path.

    The format is `kind` (".csv" or ".parquet"), or by default the suffix of the path.

    The columns are those of `lk.to_dataframe`, without this machine's paths and names. A column
    with both texts and numbers is written as text, because Parquet columns have one type.

    Raises:
        InvalidInput: The format is neither CSV nor Parquet.
        LabkitError: There are no runs.
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
    """Return text with an apostrophe before anything that a spreadsheet takes for a formula."""
    risky = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
    # `plain` escapes carriage returns, which pandas does not quote and some readers take for row
    # ends.
    return plain(f"'{text}" if risky else text) if isinstance(text, str) else text


def _column(values: pandas.Series) -> pandas.Series:
    """Return a column whose values have one type, without paths and names of this machine."""
    import pandas as pd

    present = values.dropna()
    kinds = {"number" if is_number(value) else type(value).__name__ for value in present}
    if kinds == {"number"}:
        return pd.to_numeric(values)
    if kinds == {"bool"}:
        return values.astype("boolean")
    # Each distinct text is scrubbed only once, because a thousand runs share few texts.
    text = {value: scrub(str(value)) for value in present.unique()}
    return values.map(text).astype("string")
