"""What faults have cost runs, each held against the same run without them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from labkit.records.pace import applied, in_order
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def disturbed(pairs: Mapping[str, tuple[Run, Run | None]]) -> pd.DataFrame:
    """A row a name: what counts of its disturbed run, beside the undisturbed one.

    Goodput is samples whose gradients have changed the weights, over the seconds of training;
    nothing is left of a run that has failed. Recovery is by how much the longest time in which no
    such gradient came is longer than without faults; where ranks died that others have outlived,
    what the record says of it, without the time of tracing.

    Args:
        pairs: by name, the undisturbed run and the other; None: there could be none.

    Returns: name, clock, whether it `finished`, `goodput` and `calm_goodput` (samples/s), `kept`
        (their ratio), `lost` (samples), `accuracy` and `calm_accuracy`, `recovery` (s; none where
        it did not finish).
    """
    import pandas as pd

    return pd.DataFrame([{"name": name} | _row(*pair) for name, pair in pairs.items()])


def _row(calm: Run, hit: Run | None) -> dict[str, object]:
    samples, seconds, gap = _counted(calm)
    finished = hit is not None and hit.status["state"] == "completed"
    row = {
        "clock": calm.experiment["clock"],
        "finished": finished,
        "calm_goodput": samples / seconds,
        "calm_accuracy": calm.metrics.get("test_accuracy", math.nan),
    }
    if hit is None or not finished:
        return row | {
            "goodput": 0.0,
            "kept": 0.0,
            "lost": samples,
            "accuracy": math.nan,
            "recovery": math.nan,
        }
    own, spent, longest = _counted(hit)
    if hit.metrics["faults"]:  # the dead have not told all, but a step was taken by all or by none
        counted = calm.history[calm.history["step"].isin(hit.history["step"])]
        own = int(counted["samples"].sum())
    recovery = sum(
        sum(took for part, took in fault["seconds"].items() if part != "trace")
        for fault in hit.metrics["faults"]
    )
    return row | {
        "goodput": own / spent,
        "kept": own / spent / (samples / seconds),
        "lost": max(0, samples - own),
        "accuracy": hit.metrics.get("test_accuracy", math.nan),
        "recovery": recovery or max(0.0, longest - gap),
    }


def _counted(run: Run) -> tuple[int, float, float]:
    """Samples that counted, the seconds of all, and the longest between two that came."""
    history = in_order(run.history)
    own = history[applied(history)]
    # The first step is traced.
    ended = np.sort(own["ended"].unique())
    gaps = np.diff(ended)
    return int(own["samples"].sum()), float(history["ended"].max()), float(gaps.max(initial=0.0))
