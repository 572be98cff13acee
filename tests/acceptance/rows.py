"""Store each row of a long campaign in a file, so that a later call can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.bench.command import format_value, save_rows
from labkit.common.terminal import say

if TYPE_CHECKING:
    from labkit.bench.timing import Row


def read_rows(file: Path | None) -> list[Row]:
    """Return the rows in a file; an empty list if the file does not exist."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def record_rows(new: Iterable[Row], rows: list[Row], file: Path | None) -> None:
    """Print and save each new row at once, because the campaign may end at any moment."""
    for row in new:
        rows.append(row)
        values = [f"{key}={format_value(key, value)}" for key, value in row.items()]
        say(" ".join(text for text in values if not text.startswith("bench=")), err=True)
        if file is not None:
            save_rows(rows, file)
