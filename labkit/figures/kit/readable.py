"""Tables as they are looked at: four digits, bytes in units; what is computed of them keeps all."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from labkit.common.units import bytes_text, number_text


class Table(pd.DataFrame):
    """A DataFrame that a notebook shows as people read it; its values stay what they are.

    Numbers have four digits, whole ones from a thousand on; columns whose names have the word
    bytes have units. What is selected or computed of it is such a table, too.
    """

    @property
    def _constructor(self) -> type[Table]:
        return Table

    def _repr_html_(self) -> str | None:
        # By its values: a column of mixed things holds numbers, too.
        texts = [self.iloc[:, place].map(_reader(name)) for place, name in enumerate(self.columns)]
        plain = pd.DataFrame(dict(enumerate(texts)), index=self.index)
        html: str | None = plain.set_axis(self.columns, axis=1)._repr_html_()
        return html


def readable(table: pd.DataFrame) -> Table:
    """The same table, which shows itself as people read it."""
    return Table(table)


def _reader(column: Any) -> Any:
    """What makes a text of a cell of a column."""
    of_bytes = "bytes" in re.split("[^a-z]", str(column))

    def read(value: Any) -> Any:
        if pd.api.types.is_bool(value) or not pd.api.types.is_number(value):
            return value
        if pd.isna(value):
            return ""
        if of_bytes:
            return bytes_text(value)
        return number_text(value) if pd.api.types.is_float(value) else f"{value:,}"

    return read
