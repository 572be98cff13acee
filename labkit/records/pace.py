"""At whose pace a run went: a step of all ranks together, or each worker's own steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def own_pace(history: pd.DataFrame) -> bool:
    """Whether workers went on without each other, as with asynchronous servers or backups.

    Then they have unequal numbers of steps, or gradients of weights that were old, or dropped.
    """
    if "ranks" in history:  # of steps that those took who lived
        return False
    if history.groupby(["seed", "rank"]).size().nunique() > 1:
        return True
    told = "staleness" in history and bool(history["staleness"].notna().any())
    return told and bool((history["staleness"] != 0).any())


def applied(history: pd.DataFrame) -> pd.Series[bool]:
    """Whose gradient has changed the weights; what servers dropped has no staleness."""
    known = history["staleness"].notna() if "staleness" in history else history["step"] < 0
    return known if known.any() else history["step"] >= 0


def in_order(history: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `ended`: for how many seconds their seed had trained by then.

    Of workers at their own pace, `step` is numbered anew: as many applied gradients as there are
    workers are one, in the order in which they were done. Else a step lasts as long as on its
    slowest rank.
    """
    rows = history.sort_values(["seed", "step", "rank"], kind="stable")
    if not own_pace(rows):
        steps = rows.groupby(["seed", "step"])["seconds"].max().groupby("seed").cumsum()
        return rows.join(steps.rename("ended"), on=["seed", "step"])
    rows = rows.assign(ended=rows.groupby(["seed", "rank"])["seconds"].cumsum())
    rows = rows.sort_values(["seed", "ended", "rank"], kind="stable")
    counts = applied(rows)
    done = counts.astype(int).groupby(rows["seed"]).cumsum()
    # Not the stages of a replica behind which another one's gradient counts.
    workers = rows.loc[counts, "rank"].nunique()
    return rows.assign(step=(done - 1).clip(lower=0) // max(1, workers))


def steps_until(run: Run, step: float) -> float:
    """Steps of `in_order` that make this step as epochs count them: less where backups are late."""
    strategy = run.experiment.get("strategy") or {}
    backups = strategy.get("backups") or 0 if isinstance(strategy, dict) else 0
    return step * (1 - float(backups) / int(run.experiment.get("workers") or 1))
