"""Compare forecasts with runs: check the order of rows, and compute the errors of forecasts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.bench.timing import Row
from tests.acceptance.forecasts.predictions import seal

LOUD = 0.10  # relative spread of repeats above which a setting does not count
NINE_TENTHS = 0.9


def verify(rows: Sequence[Row]) -> list[str]:
    """Return errors in the order of rows: forecasts that were written too late, or changed."""
    kinds = [row["what"] for row in rows]
    first = kinds.index("measured") if "measured" in kinds else len(kinds)
    wrong = [
        f"forecast {row['number']} was written behind a measurement"
        for row in rows[first:]
        if row["what"] == "forecast"
    ]
    foreseen = {row["number"]: row for row in rows if row["what"] == "forecast"}
    wrong += [
        f"forecast {number} is not what was sealed"
        for number, row in foreseen.items()
        if row["seal"] != seal(row)
    ]
    return wrong + [
        f"measurement {row['number']} is held against another forecast"
        for row in rows
        if row["what"] == "measured"
        and (row["number"] not in foreseen or row["of"] != foreseen[row["number"]]["seal"])
    ]


def compared(rows: Sequence[Row]) -> list[Row]:
    """Return a row per setting: forecast time, measured time (median of runs), error, and group.

    `error` is predicted / measured - 1. The column `group` separates settings on two hosts,
    settings with more ranks than cores, and settings whose runs differ by more than 10 %. The
    column `held` is the share of runs whose time is in the forecast interval.
    """
    found = []
    for row in (row for row in rows if row["what"] == "forecast"):
        own = [r for r in rows if r["what"] == "measured" and r["number"] == row["number"]]
        if not own:
            continue
        times = np.array([each["batch_ms"] for each in own], float)
        median, low, high = float(np.median(times)), float(times.min()), float(times.max())
        group = "calm"
        if str(row["case"]).endswith("two hosts"):
            group = "two hosts"
        elif any(each["oversubscribed"] for each in own):
            group = "oversubscribed"
        elif high / low - 1 > LOUD:
            group = "unsteady"
        predicted = float(row["predicted_ms"] or 0)
        inside = (float(row["low_ms"] or 0) <= times) & (times <= float(row["high_ms"] or 0))
        found.append(
            {name: row[name] for name in ("case", "network", "workers", "number")}
            | {name: row[name] for name in ("predicted_ms", "low_ms", "high_ms")}
            | {"measured_ms": median, "least_ms": low, "most_ms": high}
            | {"error": predicted / median - 1, "held": float(inside.mean()), "group": group}
        )
    return found


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row per group: number of settings, median and p90 of |error|, `held`, and bias."""
    table = compared(rows)
    found: list[Row] = []
    for group in dict.fromkeys(str(row["group"]) for row in table):
        own = [row for row in table if row["group"] == group]
        error = np.array([row["error"] for row in own], float)
        found.append(
            {
                "group": group,
                "settings": len(own),
                "error_median": float(np.median(np.abs(error))),
                "error_p90": float(np.quantile(np.abs(error), NINE_TENTHS)),
                "error_bias": float(np.median(error)),
                "held": float(np.mean([float(row["held"] or 0) for row in own])),
            }
        )
    return found


def worst(rows: Sequence[Row], count: int = 5) -> list[Row]:
    """Return the settings with the largest |error|, all from the group "calm"."""
    calm = [row for row in compared(rows) if row["group"] == "calm"]
    return sorted(calm, key=lambda row: -abs(float(row["error"] or 0)))[:count]
