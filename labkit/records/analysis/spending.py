"""What runs reached and what they spent on it; and whom nobody beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.records.run import Run, gate_failed
from labkit.records.verdict import arrivals, seeds_of

if TYPE_CHECKING:
    import pandas as pd

MEASURES = ("accuracy", "bytes", "seconds")


def spending(runs: Mapping[str, Run]) -> pd.DataFrame:
    """A row a run with a test accuracy: run, network, clock, of each measure mean, _low and _high.

    Measures, over the seeds: accuracy, a share; bytes, that all ranks put on the wire after the
    first step, in which is sent what is sent once; seconds of training after the first step,
    missing where the equivalence gate failed or a seed has one step alone.
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        seeds = [s for s in seeds_of(run) if s.metrics.get("test_accuracy") is not None]
        if seeds:
            spent = np.array([_spent(seed, gate_failed(run)) for seed in seeds])
            # Mean, low and high of a measure stand beside each other, as `columns` names them.
            ends = np.stack([spent.mean(axis=0), spent.min(axis=0), spent.max(axis=0)], axis=1)
            link = str(run.metrics.get("network")), run.metrics.get("clock") or "wall"
            rows.append([name, *link, *ends.ravel()])
    columns = [f"{measure}{end}" for measure in MEASURES for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["run", "network", "clock", *columns])


def to_target(
    runs: Mapping[str, Run], target: float, measure: str = "val_accuracy"
) -> pd.DataFrame:
    """A row a run: when it had reached a target, on its own clock, and what it had spent by then.

    Columns: run; clock; network; seeds; reached, how many of them did; and of seconds, bytes (on
    the wire, of all ranks) and samples the mean, `_low` and `_high` over those that did. Without
    seconds where the equivalence gate failed.

    Args:
        runs: by name; target, measure: as for `labkit.records.verdict.arrivals`.
    """
    import pandas as pd

    rows = []
    for name, run in runs.items():
        found = arrivals(run, target, measure)
        there = [each for each in found.values() if each is not None]
        row = {
            "run": name,
            "clock": run.metrics.get("clock"),
            "network": run.metrics.get("network"),
        }
        row |= {"seeds": len(found), "reached": len(there)}
        for column, field in _SPENT.items():
            timed = column == "seconds" and gate_failed(run)
            values = [] if timed else [float(getattr(each, field)) for each in there]
            ends = (np.mean(values), min(values), max(values)) if values else (np.nan,) * 3
            row |= {f"{column}{end}": ends[k] for k, end in enumerate(("", "_low", "_high"))}
        rows.append(row)
    return pd.DataFrame(rows)


_SPENT = {"seconds": "seconds", "bytes": "wire_bytes", "samples": "samples"}


def front(table: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """The rows with all of these measures that no other such row beats.

    One row beats another that is at least as good in all of them, and better in one. Where seconds
    are among them, only runs on the same network and clock stand against each other.
    """
    whole = table.dropna(subset=list(measures))
    # Turned, so that more is better in every column.
    signs = [1 if name == "accuracy" else -1 for name in measures]
    good = whole[list(measures)].to_numpy(float) * signs
    # Every row against every other; there are hundreds of runs at most.
    ours, theirs = good[:, None, :], good[None, :, :]
    beaten = (theirs >= ours).all(axis=2) & (theirs > ours).any(axis=2)
    if "seconds" in measures:
        for same in (whole["network"].to_numpy(), whole["clock"].to_numpy()):
            beaten &= same[:, None] == same[None, :]
    return whole[~beaten.any(axis=1)]


def steps_of(run: Run) -> int | None:
    """How many steps were trained, as the last epoch counts them; None where there is none."""
    epochs = run.metrics.get("epochs") or []
    return int(epochs[-1]["step"]) if epochs else None


def _spent(seed: Run, failed: bool) -> tuple[float, float, float]:
    """Accuracy, bytes, seconds; what the first step takes to trace and compile stands apart."""
    metrics = seed.metrics
    whole = metrics.get("train_seconds") or 0.0  # who logs a result need not time it
    seconds = whole - metrics.get("first_step_ms", 0.0) / 1e3
    told = not failed and seconds > 1e-9 * whole  # not of one step alone
    # Not from the history, which is a file more for each of a thousand runs.
    each = float(metrics.get("wire_bytes_per_step") or 0.0)
    later = (steps_of(seed) or 1) - 1
    nbytes = each * int(metrics.get("workers") or 1) * later
    return float(metrics["test_accuracy"]), nbytes, seconds if told else np.nan
