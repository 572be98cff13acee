"""Training steps of runs: shared by all ranks, or separate for each asynchronous worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def is_asynchronous(history: pd.DataFrame) -> bool:
    """Return whether workers ran asynchronously, as with parameter servers or backup workers.

    In an asynchronous run, workers have different numbers of steps, or some gradients are stale or
    dropped.
    """
    if "ranks" in history:  # after a failure, only surviving ranks have steps
        return False
    if history.groupby(["seed", "rank"]).size().nunique() > 1:
        return True
    has_staleness = "staleness" in history and bool(history["staleness"].notna().any())
    return has_staleness and bool((history["staleness"] != 0).any())


def is_applied(history: pd.DataFrame) -> pd.Series[bool]:
    """Return which gradients changed the weights; dropped gradients have no staleness."""
    was_applied = history["staleness"].notna() if "staleness" in history else history["step"] < 0
    return was_applied if was_applied.any() else history["step"] >= 0


def with_end_times(history: pd.DataFrame) -> pd.DataFrame:
    """Return the history with a column `ended`: training seconds until the end of each step.

    In synchronous runs, the duration of a training step is that of the slowest rank. In
    asynchronous runs, the column `step` is renumbered in order of completion, so that the number of
    applied gradients in each step equals the number of workers.
    """
    rows = history.sort_values(["seed", "step", "rank"], kind="stable")
    if not is_asynchronous(rows):
        steps = rows.groupby(["seed", "step"])["seconds"].max().groupby("seed").cumsum()
        return rows.join(steps.rename("ended"), on=["seed", "step"])
    rows = rows.assign(ended=rows.groupby(["seed", "rank"])["seconds"].cumsum())
    rows = rows.sort_values(["seed", "ended", "rank"], kind="stable")
    counts = is_applied(rows)
    done = counts.astype(int).groupby(rows["seed"]).cumsum()
    # Ranks without applied gradients are other stages of a replica, so they do not count as
    # workers.
    workers = rows.loc[counts, "rank"].nunique()
    return rows.assign(step=(done - 1).clip(lower=0) // max(1, workers))


def steps_until(run: Run, step: float) -> float:
    """Convert a step number of an epoch record to a step number as in `with_end_times`.

    With backup workers, `with_end_times` returns fewer steps than the epoch record has, because
    late gradients are dropped.
    """
    strategy = run.experiment.get("strategy") or {}
    backups = strategy.get("backup_workers") or 0 if isinstance(strategy, dict) else 0
    return step * (1 - float(backups) / int(run.experiment.get("workers") or 1))
