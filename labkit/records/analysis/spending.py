"""Accuracy and costs of runs, costs until a target is reached, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.records.run import Run, equivalence_failed
from labkit.records.verdict import arrivals, completed_seeds

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("accuracy", "bytes", "seconds")


def spending(runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return the accuracy and the costs of each run that has a test accuracy, one row per run.

    The columns are run, network, clock, and for each measure the mean, minimum (`_low`) and maximum
    (`_high`) over seeds. The measures are the test accuracy (between 0 and 1), the total bytes that
    all ranks send, and the seconds of training. Bytes and seconds exclude the first training step,
    which also compiles the model and sends one-time data. The seconds are missing if verification
    failed, or if a seed has only one training step.
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        seeds = [s for s in completed_seeds(run) if s.metrics.get("test_accuracy") is not None]
        if seeds:
            spent = np.array([_spent(seed, equivalence_failed(run)) for seed in seeds])
            # The mean, minimum and maximum of a measure become adjacent columns, in the order of
            # `columns`.
            bands = np.stack([spent.mean(axis=0), spent.min(axis=0), spent.max(axis=0)], axis=1)
            link = str(run.metrics.get("network")), run.metrics.get("clock") or "wall"
            rows.append([name, *link, *bands.ravel()])
    columns = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["run", "network", "clock", *columns])


def to_target(
    runs: Mapping[str, Run], target: float, measure: str = "val_accuracy"
) -> pd.DataFrame:
    """Return the costs of each run until it reached a target accuracy or loss.

    The first columns are run, clock, network, seeds (number of seeds) and reached (number of seeds
    that reached the target). For seconds, bytes (sent by all ranks) and samples, the table has the
    mean, minimum (`_low`) and maximum (`_high`) over the seeds that reached the target. The seconds
    are missing for runs that failed verification.

    Args:
        runs: Runs by name.
        target: Accuracy or loss to be reached, see `labkit.records.verdict.arrivals`.
        measure: Metric to which the target applies, "val_accuracy" or "val_loss".
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        arrivals_by_seed = arrivals(run, target, measure)
        reached = [arrival for arrival in arrivals_by_seed.values() if arrival is not None]
        row = {
            "run": name,
            "clock": run.metrics.get("clock"),
            "network": run.metrics.get("network"),
        }
        row |= {"seeds": len(arrivals_by_seed), "reached": len(reached)}
        for column, field in _SPENT.items():
            timed = column == "seconds" and equivalence_failed(run)
            values = [] if timed else [float(getattr(arrival, field)) for arrival in reached]
            band = (np.mean(values), min(values), max(values)) if values else (np.nan,) * 3
            row |= {f"{column}{suffix}": band[k] for k, suffix in enumerate(("", "_low", "_high"))}
        rows.append(row)
    return pd.DataFrame(rows)


_SPENT = {"seconds": "seconds", "bytes": "wire_bytes", "samples": "samples"}


def front(table: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """Return the Pareto front: the rows that no other row dominates, without incomplete rows.

    One row dominates another row if it is at least as good in all measures, and better in at least
    one. If seconds are among the measures, a run is compared only with runs on the same network and
    clock.
    """
    complete_rows = table.dropna(subset=list(measures))
    # Each column is multiplied by its sign, so that greater values are better in all columns.
    signs = [1 if name == "accuracy" else -1 for name in measures]
    scores = complete_rows[list(measures)].to_numpy(float) * signs
    # The code compares all pairs of rows, which is fast enough for a few hundred runs.
    first, second = scores[:, None, :], scores[None, :, :]
    beaten = (second >= first).all(axis=2) & (second > first).any(axis=2)
    if "seconds" in measures:
        for same in (complete_rows["network"].to_numpy(), complete_rows["clock"].to_numpy()):
            beaten &= same[:, None] == same[None, :]
    return complete_rows[~beaten.any(axis=1)]


def steps_of(run: Run) -> int | None:
    """Return the number of training steps until the last epoch's end; None without epochs."""
    epochs = run.metrics.get("epochs") or []
    return int(epochs[-1]["step"]) if epochs else None


def _spent(seed: Run, failed: bool) -> tuple[float, float, float]:
    """Return a seed's accuracy, and its bytes and seconds after the first training step."""
    metrics = seed.metrics
    total_seconds = metrics.get("train_seconds") or 0.0  # missing for runs that only log results
    seconds = total_seconds - metrics.get("first_step_ms", 0.0) / 1e3
    # If a run has only one training step, no time remains after the first step.
    is_valid = not failed and seconds > 1e-9 * total_seconds
    # The bytes are computed from the metrics, because it would take too long to read a thousand
    # histories.
    bytes_per_step = float(metrics.get("wire_bytes_per_step") or 0.0)
    steps_after_first = (steps_of(seed) or 1) - 1
    nbytes = bytes_per_step * int(metrics.get("workers") or 1) * steps_after_first
    return float(metrics["test_accuracy"]), nbytes, seconds if is_valid else np.nan
