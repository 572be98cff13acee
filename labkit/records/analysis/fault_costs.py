"""The costs of faults: each run with faults is compared with an equal run without faults."""

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
    """Return one row per pair of runs, one without faults ("undisturbed") and one with faults.

    Goodput is the number of samples whose gradients changed the weights, per second of training
    time. The goodput is 0 if the run failed. Recovery is the increase, due to the faults, of the
    longest time between two applied gradients. If training continued after ranks died, recovery is
    the recorded recovery time, without the time for tracing.

    Args:
        pairs: For each name, the run without faults (undisturbed) and the run with faults
            (disturbed). The run with faults is None if the strategy cannot run with the fault.

    Returns:
        A table with name, clock, `finished`, `goodput` (samples/s), `kept` (goodput divided by
        `calm_goodput`), `lost` (samples), `accuracy`, and `recovery` (seconds; NaN if the run did
        not finish). The columns `calm_goodput` and `calm_accuracy` contain the values of the run
        without faults.
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
    # History rows of dead ranks may be missing, so the number of samples is computed from the run
    # without faults. The runs with and without faults have the same number of samples per step,
    # because a step was completed either by all ranks or by none.
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
    """Return applied samples, total seconds, and the longest seconds between applied gradients."""
    history = with_end_times(run.history)
    counted_rows = history[is_applied(history)]
    # The times in `ended` are the ends of steps, so no difference between two of the times includes
    # the first step, in which the model is traced.
    ended = np.sort(counted_rows["ended"].unique())
    gaps = np.diff(ended)
    return (
        int(counted_rows["samples"].sum()),
        float(history["ended"].max()),
        float(gaps.max(initial=0.0)),
    )
