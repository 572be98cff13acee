"""How far training had come, and after how many steps, seconds and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from labkit.records.pace import in_order, steps_until
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd


def loss_curve(history: pd.DataFrame) -> pd.DataFrame:
    r"""The mean over ranks, weighted by samples: \(\sum_r n_r \ell_r / \sum_r n_r\) at each step.

    Columns: step (1, 2, 3, … as the records of epochs count them); seconds of training since the
    end of the first step, which traces and compiles; bytes that all ranks have put on the wire
    since then, for the first step sends what is sent once: initial weights, the trial of `auto`;
    loss, its mean over seeds with `loss_low` and `loss_high`; smooth, smooth_low and smooth_high,
    the same averaged over about a twentieth of the run; seeds, how many.

    A step takes as long as on its slowest rank; of workers at their own pace it is as many applied
    gradients as there are workers. Steps that not all seeds reached are left out.
    Without rows for a history without rows.
    """
    import pandas as pd

    if history.empty:
        return pd.DataFrame(columns=["step", "seconds", "bytes", "loss", "smooth", "seeds"])
    rows = in_order(history)
    # A rank with an empty batch reports no loss; NaN x 0 must not spoil the others' mean.
    known = rows["loss"].notna()
    # Who logs a curve need not count its samples.
    rows["weight"] = rows["samples"].fillna(1).where(known, 0)
    # Sums of products, divided once: pandas has no weighted mean of groups.
    rows["weighted"] = (rows["loss"] * rows["weight"]).where(rows["weight"] > 0, 0.0)
    steps = rows.groupby(["seed", "step"]).agg(
        weighted=("weighted", "sum"),
        weight=("weight", "sum"),
        rows=("weight", "size"),
        seconds=("ended", "max"),
        nbytes=("wire_bytes", "sum"),
    )
    steps["loss"] = steps["weighted"] / steps["weight"].where(steps["weight"] > 0)
    loss, seconds, nbytes = (steps[name].unstack("seed") for name in ("loss", "seconds", "nbytes"))
    # A mean over other seeds than before would jump.
    reached = steps["rows"].unstack("seed").notna().all(axis=1)
    loss, seconds = loss[reached], seconds[reached]
    drawn = {
        "loss": loss.mean(axis=1, skipna=False).to_numpy(),
        "loss_low": loss.min(axis=1).to_numpy(),
        "loss_high": loss.max(axis=1).to_numpy(),
    }
    step = loss.index.to_numpy()
    return pd.DataFrame(
        {
            "step": step - step[0] + 1,
            "seconds": (seconds - seconds.iloc[0]).mean(axis=1).to_numpy(),
            "bytes": (nbytes[reached].cumsum() - nbytes[reached].iloc[0]).mean(axis=1).to_numpy(),
            **drawn,
            **{name.replace("loss", "smooth"): smoothed(each) for name, each in drawn.items()},
            "seeds": loss.shape[1],
        }
    )


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred moving mean over a twentieth of the values; at the ends over what is there.

    A value that is infinite or not a number leaves a gap at its place, and nowhere else.
    """
    import pandas as pd

    width = len(values) // 40  # to both sides, so that a twentieth of the run is averaged
    known = pd.Series(values, dtype=float).where(np.isfinite(values))
    mean = known.rolling(2 * width + 1, center=True, min_periods=1).mean()
    return np.asarray(mean.where(known.notna()))


def epoch_results(run: Run, curve: pd.DataFrame) -> pd.DataFrame:
    """What was measured after each epoch, with the steps, seconds and bytes until then.

    Args:
        run: whose epochs.
        curve: of its losses, from `loss_curve`, which says how long its steps took and what they
            sent; what lies behind it has the seconds of rank 0, and no bytes.
    """
    import pandas as pd

    metrics = run.metrics
    table = pd.DataFrame(metrics.get("epochs") or [])
    if table.empty:
        return pd.DataFrame(columns=["step", "seconds", "bytes"])
    # As for the loss: what the first step takes to trace and compile stands apart.
    first = (metrics.get("first_step_ms") or 0.0) / 1e3
    table["seconds"] = (table["seconds"].astype(float) - first).clip(lower=0.0)
    table["bytes"] = np.nan
    table["step"] = [steps_until(run, step) for step in table["step"]]
    if len(curve):
        reached = table["step"] <= curve["step"].iloc[-1]
        # On the curve's own axes: rank 0 may have waited less than the slowest rank.
        for name in ("seconds", "bytes"):
            spent = np.interp(table["step"], curve["step"], curve[name])
            table[name] = table[name].where(~reached, spent)
    return table
