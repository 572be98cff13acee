"""Learning curves: loss of steps, test results of epochs; over steps, seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.figures.kit.entries import MANY, Entry, transparent

if TYPE_CHECKING:
    import pandas

POINTS = 300  # a panel shows no more; of many runs a quarter: a hundred are drawn at once
FEW = 8  # above so many runs the unsmoothed lines would only be fog


@dataclass(frozen=True)
class LossCurve:
    """Mean loss over ranks at each step; of several seeds mean, least and greatest.

    step, seconds, nbytes, loss, low, high: shape (steps,); smooth: the loss, smoothed; seeds: how
    many. seconds: of training since the end of the first step, which traces and compiles; nbytes:
    that all ranks have put on the wire, the first step's too.
    """

    step: np.ndarray
    seconds: np.ndarray
    nbytes: np.ndarray
    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int

    @property
    def done(self) -> np.ndarray:
        """Steps done at each point: 1, 2, 3, … as the records of the epochs count them."""
        return np.asarray(self.step - self.step[0] + 1)

    @property
    def smooth(self) -> np.ndarray:
        """The loss averaged over about a twentieth of the run."""
        return smoothed(self.loss)

    def over(self, measure: str) -> np.ndarray:
        """What was spent at each point: steps, seconds or bytes."""
        return {"step": self.done, "seconds": self.seconds, "bytes": self.nbytes}[measure]


def loss_curve(history: pandas.DataFrame) -> LossCurve | None:
    r"""The mean over ranks, weighted by samples: \(\sum_r n_r \ell_r / \sum_r n_r\) at each step.

    A step takes as long as on its slowest rank. Steps that not all seeds reached are left out.
    None for a history without rows.
    """
    if history.empty:
        return None
    rows = history[["seed", "step", "loss", "samples", "seconds", "wire_bytes"]].copy()
    # A rank with an empty batch reports no loss; NaN x 0 must not spoil the others' mean.
    known = rows["loss"].notna()
    rows["weight"] = rows["samples"].where(known, 0)
    rows["weighted"] = (rows["loss"] * rows["weight"]).where(rows["weight"] > 0, 0.0)
    steps = rows.groupby(["seed", "step"]).agg(
        weighted=("weighted", "sum"),
        weight=("weight", "sum"),
        seconds=("seconds", "max"),
        nbytes=("wire_bytes", "sum"),
    )
    steps["loss"] = steps["weighted"] / steps["weight"].where(steps["weight"] > 0)
    loss = steps["loss"].unstack("seed")
    seconds = steps["seconds"].unstack("seed")
    reached = seconds.notna().all(axis=1)
    nbytes = steps["nbytes"].unstack("seed")[reached].cumsum()
    loss, seconds = loss[reached], seconds[reached].cumsum()
    seconds -= seconds.iloc[0]
    return LossCurve(
        step=loss.index.to_numpy(),
        seconds=seconds.mean(axis=1).to_numpy(),
        nbytes=nbytes.mean(axis=1).to_numpy(),
        loss=loss.mean(axis=1, skipna=False).to_numpy(),
        low=loss.min(axis=1).to_numpy(),
        high=loss.max(axis=1).to_numpy(),
        seeds=loss.shape[1],
    )


def smoothed(values: np.ndarray) -> np.ndarray:
    """A centred moving mean over a twentieth of the values; at the ends over what is there.

    A value that is infinite or not a number leaves a gap at its place, and nowhere else.
    """
    width = len(values) // 40
    known = np.isfinite(values)
    if width == 0 or not known.any():
        return np.where(known, values, np.nan)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    first, last = np.maximum(place - width, 0), np.minimum(place + width + 1, len(values))
    mean = (total[last] - total[first]) / np.maximum(count[last] - count[first], 1)
    return np.asarray(np.where(known, mean, np.nan))


def loss_traces(entry: Entry, curve: LossCurve, over: str, runs: int) -> list[dict[str, Any]]:
    """Traces of one run's loss: the band of its seeds or the unsmoothed line, then the line.

    runs: in the panel; of few, the unsmoothed lines are shown; of many, fewer points.
    """
    faint = runs <= FEW
    points = POINTS if faint else POINTS // 2 if runs <= MANY else POINTS // 4
    keep = np.unique(np.linspace(0, len(curve.step) - 1, points).round().astype(int))
    x = _thin(curve.over(over)[keep])
    quiet = {"x": x, "mode": "lines", "showlegend": False, "hoverinfo": "skip"} | entry.style
    traces = []
    if curve.seeds > 1:
        edge = {"line": {"width": 0}}
        fill = {"fill": "tonexty", "fillcolor": transparent(entry.color, 0.2)}
        traces += [
            quiet | edge | {"y": _thin(smoothed(curve.low)[keep])},
            quiet | edge | fill | {"y": _thin(smoothed(curve.high)[keep])},
        ]
    elif faint:
        line = {"color": transparent(entry.color, 0.3), "width": 1}
        traces.append(quiet | {"y": _thin(curve.loss[keep]), "line": line})
    main = {"x": x, "y": _thin(curve.smooth[keep]), "showlegend": False}
    return [*traces, main | _look(entry, len(keep), marks=False) | entry.style]


def epoch_measure(shown: Sequence[Entry]) -> tuple[str, str]:
    """The key and the words of what epochs are judged by: accuracy, where there is any."""
    found = {name for entry in shown for epoch in _epochs(entry) for name in epoch}
    if "val_accuracy" in found:
        return "val_accuracy", "Test accuracy"
    return "val_loss", "Test loss"


def epoch_trace(
    entry: Entry, measure: str, over: str, curve: LossCurve | None, many: bool = False
) -> dict[str, Any] | None:
    """One run's test results, a marker an epoch (of many runs the line alone); None without any."""
    epochs = [epoch for epoch in _epochs(entry) if epoch.get(measure) is not None]
    points = [(_spent(entry, epoch, over, curve), epoch[measure]) for epoch in epochs]
    known = [(x, y) for x, y in points if x is not None]
    if not known:
        return None
    x, y = map(list, zip(*known, strict=True))
    drawn = {"x": x, "y": y, "showlegend": False}
    return drawn | _look(entry, len(known), marks=not many) | entry.style


def _look(entry: Entry, points: int, marks: bool) -> dict[str, Any]:
    """A line, with a marker at each point or without; one point alone, of which no line is seen."""
    marker = {"color": entry.color, "symbol": entry.symbol, "size": 7}
    if points == 1:
        return {"mode": "markers", "marker": marker}
    line = {"mode": "lines", "line": {"color": entry.color, "dash": entry.dash, "width": 2}}
    return line | {"mode": "lines+markers", "marker": marker} if marks else line


def _spent(entry: Entry, epoch: dict[str, Any], over: str, curve: LossCurve | None) -> float | None:
    """Steps, seconds or bytes until the end of an epoch; None where the history ends before."""
    if over == "step":
        return float(epoch["step"])
    if over == "seconds":
        # As for the loss: what the first step takes to trace and compile stands apart.
        return max(float(epoch["seconds"] - (entry.metrics.get("first_step_ms") or 0.0) / 1e3), 0.0)
    if curve is None or epoch["step"] > curve.done[-1]:
        return None
    return float(np.interp(epoch["step"], curve.done, curve.nbytes))


def in_words(entry: Entry, curve: LossCurve | None) -> str:
    """`loss 2.3 → 0.21 in 60 steps and 0.3 s, test accuracy 0.95`."""
    parts = []
    if curve is not None and len(curve.step):
        ends = f"{curve.smooth[0]:.3g} → {curve.smooth[-1]:.3g}"
        time = "" if entry.gate_failed else f" and {curve.seconds[-1]:.3g} s"
        parts.append(f"loss {ends} in {len(curve.step)} steps{time}")
    for key, words in (("test_accuracy", "test accuracy"), ("test_loss", "test loss")):
        if entry.metrics.get(key) is not None:
            parts.append(f"{words} {entry.metrics[key]:.3g}")
            break
    return ", ".join(parts) or "no curve"


def _epochs(entry: Entry) -> list[dict[str, Any]]:
    return list(entry.metrics.get("epochs") or [])


def _thin(values: np.ndarray) -> np.ndarray:
    """Half the digits: six are more than a figure shows."""
    return values.astype(np.float32)
