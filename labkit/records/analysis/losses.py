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
    seeds, seed = np.unique(rows["seed"], return_inverse=True)
    step, place = np.unique(rows["step"], return_inverse=True)
    shape = (len(seeds), len(step))
    # In NumPy: groups of pandas take ten times as long, and a page has a hundred such curves.
    cell = seed * len(step) + place
    losses, ended, wire = (rows[name].to_numpy(float) for name in ("loss", "ended", "wire_bytes"))
    # A rank with an empty batch reports no loss; who logs a curve need not count its samples.
    weight = np.where(np.isnan(losses), 0.0, rows["samples"].fillna(1).to_numpy(float))

    def summed(values: np.ndarray) -> np.ndarray:
        return np.bincount(cell, values, minlength=seed_steps).reshape(shape)

    seed_steps = shape[0] * shape[1]
    seconds = np.full(seed_steps, np.nan)
    np.fmax.at(seconds, cell, ended)
    # A mean over other seeds than before would jump.
    reached = (np.bincount(cell, minlength=seed_steps).reshape(shape) > 0).all(axis=0)
    # Sums of products, divided once; NaN x 0 must not spoil the others' mean.
    whole = summed(weight)[:, reached]
    weighted = summed(np.where(weight > 0, losses, 0.0) * weight)[:, reached]
    loss = np.divide(weighted, whole, out=np.full_like(whole, np.nan), where=whole > 0)
    seconds = seconds.reshape(shape)[:, reached]
    nbytes = summed(np.nan_to_num(wire))[:, reached].cumsum(axis=1)
    lines = {"loss": loss.mean(axis=0)}
    lines |= {"loss_low": np.fmin.reduce(loss), "loss_high": np.fmax.reduce(loss)}
    smooth = smoothed(lines["loss"])
    # Of one seed the ends are the line.
    ends = [smoothed(line) if len(seeds) > 1 else smooth for line in [*lines.values()][1:]]
    return pd.DataFrame(
        {
            "step": step[reached] - step[reached][:1] + 1,
            "seconds": (seconds - seconds[:, :1]).mean(axis=0),
            "bytes": (nbytes - nbytes[:, :1]).mean(axis=0),
            **lines,
            **dict(zip(("smooth", "smooth_low", "smooth_high"), (smooth, *ends), strict=True)),
            "seeds": len(seeds),
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
    step = np.array([steps_until(run, step) for step in table["step"]])
    spent = {"seconds": np.clip(table["seconds"].to_numpy(float) - first, 0.0, None)}
    spent["bytes"] = np.full(len(step), np.nan)
    if len(curve):
        reached = step <= curve["step"].iloc[-1]
        # On the curve's own axes: rank 0 may have waited less than the slowest rank.
        for name, own in spent.items():
            spent[name] = np.where(reached, np.interp(step, curve["step"], curve[name]), own)
    return table.assign(step=step, **spent)
