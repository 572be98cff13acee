"""Test accuracies of runs with their range over seeds, and findings about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import nan
from typing import Any

import pandas as pd

from labkit.figures.kit.entries import Finding
from labkit.records.analysis.columns import seed_range
from labkit.records.run import Run

PERCENT = "{:.1%}".format


COLUMNS = ("accuracy", "accuracy_low", "accuracy_high", "seeds", "wire_bytes", "seconds")


def accuracy_range(run: Run) -> tuple[float, float, float]:
    """Return a run's test accuracy, and its least and greatest value over seeds."""
    accuracy = float(run.metrics["test_accuracy"])
    low, high = seed_range(run, "test_accuracy") or (accuracy, accuracy)
    return accuracy, low, high


def accuracy_table(
    runs: Iterable[Run], describe: Callable[[Run], Mapping[str, Any]]
) -> pd.DataFrame:
    """Return one row per run, with description, accuracy, seeds, bytes per step, training seconds.

    Args:
        runs: Runs with test accuracies.
        describe: Function that returns a run's first columns, as a mapping from column name to
            value.
    """
    rows = []
    for run in runs:
        spent = (float(run.metrics.get(n, nan)) for n in ("wire_bytes_per_step", "train_seconds"))
        values = (*accuracy_range(run), int(run.metrics.get("repeats", 1)), *spent)
        rows.append({**describe(run), **dict(zip(COLUMNS, values, strict=True))})
    return pd.DataFrame(rows)


def accuracy_finding(row: Any, head: str = "", subject: str = "", *details: str) -> Finding:
    """Return a finding about one row of `accuracy_table`; the row comes from `itertuples`."""
    band = row.accuracy_low, row.accuracy_high
    return Finding(head, subject, row.accuracy, band, row.seeds, PERCENT, details=details)


def list_accuracies(table: pd.DataFrame) -> str:
    """List labels (column `way`) and accuracies, such as `ring 91.0%, complete 92.0%`."""
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())


def is_better(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Return whether every seed of `ours` is more accurate than every seed of `theirs`."""
    return bool(ours["accuracy_low"].min() > theirs["accuracy_high"].max())


def is_near(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Return whether every row of `ours`, at its best seed, reaches the worst seed in `theirs`."""
    return bool((ours["accuracy_high"] >= theirs["accuracy_low"].min()).all())
