"""Steps of synchronous runs, common to all ranks, and of asynchronous runs, by worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def is_asynchronous(history: pd.DataFrame) -> bool:
    """Return True if workers ran asynchronously, as with parameter servers or backup workers.

    Workers of asynchronous runs differ in their number of steps, or have stale or dropped
    gradients.
    """
    if "ranks" in history:  # After a failure, only surviving ranks have steps.
        return False
    if history.groupby(["seed", "rank"]).size().nunique() > 1:
        return True
    has_staleness = "staleness" in history and bool(history["staleness"].notna().any())
    return has_staleness and bool((history["staleness"] != 0).any())


def is_applied(history: pd.DataFrame) -> pd.Series[bool]:
    """Return a mask of gradients that changed the weights; dropped gradients lack a staleness."""
    was_applied = history["staleness"].notna() if "staleness" in history else history["step"] < 0
    return was_applied if was_applied.any() else history["step"] >= 0


def with_end_times(history: pd.DataFrame) -> pd.DataFrame:
    """Return history rows with a column `ended`: seconds of training until the step's end.

    In synchronous runs, a step lasts as long as on its slowest rank. In asynchronous runs, `step`
    is renumbered in the order of completion: each step has as many applied gradients as there are
    workers.
    """
    rows = history.sort_values(["seed", "step", "rank"], kind="stable")
    if not is_asynchronous(rows):
        steps = rows.groupby(["seed", "step"])["seconds"].max().groupby("seed").cumsum()
        return rows.join(steps.rename("ended"), on=["seed", "step"])
    rows = rows.assign(ended=rows.groupby(["seed", "rank"])["seconds"].cumsum())
    rows = rows.sort_values(["seed", "ended", "rank"], kind="stable")
    counts = is_applied(rows)
    done = counts.astype(int).groupby(rows["seed"]).cumsum()
    # Ranks without counted gradients are other stages of a replica, and not workers.
    workers = rows.loc[counts, "rank"].nunique()
    return rows.assign(step=(done - 1).clip(lower=0) // max(1, workers))


def steps_until(run: Run, step: float) -> float:
    """Convert a step of an epoch record to a step of `with_end_times`.

    With backup workers there are fewer of these, because late gradients are dropped.
    """
    strategy = run.experiment.get("strategy") or {}
    backups = strategy.get("backup_workers") or 0 if isinstance(strategy, dict) else 0
    return step * (1 - float(backups) / int(run.experiment.get("workers") or 1))
