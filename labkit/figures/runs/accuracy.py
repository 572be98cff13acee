"""Accuracies of runs with their range over seeds, and findings made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import nan
from typing import Any

import pandas as pd

from labkit.figures.kit.findings import Finding
from labkit.records.analysis.columns import spread
from labkit.records.run import Run

PERCENT = "{:.1%}".format
COLUMNS = ("accuracy", "accuracy_low", "accuracy_high", "seeds", "wire_bytes", "seconds")


def accuracy_range(run: Run) -> tuple[float, float, float]:
    """Return the test accuracy of a run, and the least and the greatest over its seeds."""
    accuracy = float(run.metrics["test_accuracy"])
    low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
    return accuracy, low, high


def accuracy_table(
    runs: Iterable[Run], describe: Callable[[Run], Mapping[str, Any]]
) -> pd.DataFrame:
    """Return a row a run: its description, then accuracy, seeds, bytes a step and seconds.

    Args:
        runs: with test accuracies.
        describe: makes the first columns of a run's row.
    """
    rows = []
    for run in runs:
        spent = (float(run.metrics.get(n, nan)) for n in ("wire_bytes_per_step", "train_seconds"))
        values = (*accuracy_range(run), int(run.metrics.get("repeats", 1)), *spent)
        rows.append({**describe(run), **dict(zip(COLUMNS, values, strict=True))})
    return pd.DataFrame(rows)


def accuracy_finding(row: Any, what: str = "", who: str = "", *details: str) -> Finding:
    """Return the finding of a row of `accuracy_table`, as `itertuples` gives it."""
    band = row.accuracy_low, row.accuracy_high
    return Finding(what, who, row.accuracy, band, row.seeds, PERCENT, details=details)


def list_accuracies(table: pd.DataFrame) -> str:
    """Return `ring 91.0%, complete 92.0%`, from the columns way and accuracy."""
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())


def is_better(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Return whether every seed of ours is above every seed of theirs."""
    return bool(ours["accuracy_low"].min() > theirs["accuracy_high"].max())


def is_near(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Return whether each range of ours reaches the lowest of theirs, or lies above it."""
    return bool((ours["accuracy_high"] >= theirs["accuracy_low"].min()).all())
