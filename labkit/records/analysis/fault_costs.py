"""The costs of faults: a run with faults is compared with an equal run without faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from labkit.records.pace import is_applied, with_end_times
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def compare_faults(pairs: Mapping[str, tuple[Run, Run | None]]) -> pd.DataFrame:
    """Return one row per pair of an undisturbed run and a run with faults ("disturbed").

    Goodput is the number of samples per second of training whose gradients changed the weights. It
    is 0 if the run failed. Recovery is the increase, caused by the faults, of the longest time
    between two applied gradients. If training continued after the death of ranks, recovery is the
    recorded duration of recovery, without the time for tracing.

    Args:
        pairs: For each name, the undisturbed run and the disturbed run. The latter is None if the
            strategy cannot run with the fault.

    Returns:
        A table with name, clock, `finished`, `goodput` (samples/s), `kept` (goodput divided by
        `calm_goodput`), `lost` (samples), `accuracy`, and `recovery` (seconds; NaN if the run did
        not finish). The columns `calm_goodput` and `calm_accuracy` contain the values of the
        undisturbed run.
    """
    import pandas as pd

    return pd.DataFrame([{"name": name} | _row(*pair) for name, pair in pairs.items()])


def _row(calm: Run, disturbed_run: Run | None) -> dict[str, object]:
    samples, seconds, gap = _applied_samples(calm)
    finished = disturbed_run is not None and disturbed_run.status["state"] == "completed"
    row = {
        "clock": calm.experiment["clock"],
        "finished": finished,
        "calm_goodput": samples / seconds,
        "calm_accuracy": calm.metrics.get("test_accuracy", math.nan),
    }
    if disturbed_run is None or not finished:
        return row | {
            "goodput": 0.0,
            "kept": 0.0,
            "lost": samples,
            "accuracy": math.nan,
            "recovery": math.nan,
        }
    counted_samples, disturbed_seconds, disturbed_gap = _applied_samples(disturbed_run)
    # History rows of dead ranks may be missing, so the number of samples is computed from the
    # undisturbed run. The numbers of samples per step agree, because either all ranks completed a
    # step or none did.
    if disturbed_run.metrics["faults"]:
        counted = calm.history[calm.history["step"].isin(disturbed_run.history["step"])]
        counted_samples = int(counted["samples"].sum())
    recovery = sum(
        sum(
            seconds_of_part for part, seconds_of_part in fault["seconds"].items() if part != "trace"
        )
        for fault in disturbed_run.metrics["faults"]
    )
    return row | {
        "goodput": counted_samples / disturbed_seconds,
        "kept": counted_samples / disturbed_seconds / (samples / seconds),
        "lost": max(0, samples - counted_samples),
        "accuracy": disturbed_run.metrics.get("test_accuracy", math.nan),
        "recovery": recovery or max(0.0, disturbed_gap - gap),
    }


def _applied_samples(run: Run) -> tuple[int, float, float]:
    """Return applied samples, total seconds, and longest seconds between applied gradients."""
    history = with_end_times(run.history)
    counted_rows = history[is_applied(history)]
    # The times are those of the ends of steps, so the duration of the traced first step is in no
    # gap.
    ended = np.sort(counted_rows["ended"].unique())
    gaps = np.diff(ended)
    return (
        int(counted_rows["samples"].sum()),
        float(history["ended"].max()),
        float(gaps.max(initial=0.0)),
    )
