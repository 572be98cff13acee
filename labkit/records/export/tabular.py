"""Runs as one table in a file: a row a run, parameters and metrics as columns."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.common.content import JSON
from labkit.common.errors import InvalidInput, LabkitError
from labkit.common.privacy import scrub
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
    table = _plain(frame(runs))
    if table.empty:
        raise LabkitError("no runs to export: give runs, or a folder that has some (usually runs/)")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == ".csv":
        return write_atomically(path, table.to_csv(index=False))
    content = io.BytesIO()
    table.to_parquet(content, index=False)
    return write_atomically(path, content.getvalue())


def _plain(table: pandas.DataFrame) -> pandas.DataFrame:
    """Columns of one type each; text that names no machine."""
    columns = {name: _column(table[name]) for name in table.columns}
    return table.assign(**columns)


def _column(values: pandas.Series) -> pandas.Series:
    import pandas as pd

    known = values.dropna()
    kinds = {"number" if _is_number(value) else type(value).__name__ for value in known}
    if kinds == {"number"}:
        return pd.to_numeric(values)
    if kinds == {"bool"}:
        return values.astype("boolean")
    text = {value: scrub(str(value)) for value in known.unique()}
    return values.map(text).astype("string")


def _is_number(value: JSON) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
