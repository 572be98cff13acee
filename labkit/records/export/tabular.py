"""Runs as one table in a file: a row a run, parameters and metrics as columns."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.canonical_json import is_number
from labkit.common.errors import InvalidInput
from labkit.common.privacy import scrub
from labkit.common.terminal import plain
from labkit.records.export.fields import at_least_one
from labkit.records.run import Run, frame
from labkit.records.store import write_atomically

if TYPE_CHECKING:
    import pandas

KINDS = (".csv", ".parquet")


def export(runs: Iterable[Run], path: Path | str, kind: str | None = None) -> Path:
    """Write the frame of runs as CSV or Parquet: of this kind, or as the file's name ends.

    The columns are those of `lk.frame`, without this machine's paths and names; one that holds
    words in some runs and numbers in others is text, for Parquet knows one type a column.

    Raises: InvalidInput, another kind; LabkitError, no runs.
    """
    path = Path(path)
    kind = kind or path.suffix.lower()
    if kind not in KINDS:
        raise InvalidInput(f"{path.name} ends in neither {' nor '.join(KINDS)}: name it so")
    table = frame(at_least_one(runs))
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
    """Text that a spreadsheet takes for text: what begins like a formula gets an apostrophe."""
    risky = isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r"))
    # A carriage return ends a row for some readers, and pandas does not quote it.
    return plain(f"'{text}" if risky else text) if isinstance(text, str) else text


def _column(values: pandas.Series) -> pandas.Series:
    """A column of one type; text that names no machine."""
    import pandas as pd

    known = values.dropna()
    kinds = {"number" if is_number(value) else type(value).__name__ for value in known}
    if kinds == {"number"}:
        return pd.to_numeric(values)
    if kinds == {"bool"}:
        return values.astype("boolean")
    # Each text once: a thousand runs share a few names of models and networks.
    text = {value: scrub(str(value)) for value in known.unique()}
    return values.map(text).astype("string")
