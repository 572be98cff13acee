"""Rows of a campaign that lasts for hours: a file keeps each one, and a later call goes on."""

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
    """Return the rows that a file has; none where there is no file."""
    if file is None or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def record_rows(new: Iterable[Row], rows: list[Row], file: Path | None) -> None:
    """Add rows as they come; print each, and save all: the campaign may end at any moment."""
    for row in new:
        rows.append(row)
        values = [f"{key}={format_value(key, value)}" for key, value in row.items()]
        say(" ".join(text for text in values if not text.startswith("bench=")), err=True)
        if file is not None:
            save_rows(rows, file)
