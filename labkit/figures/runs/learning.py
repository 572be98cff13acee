"""Learning curves as panels: loss of steps in one row, test results of epochs in the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import amounts_axis
from labkit.figures.kit.axes import SHARES
from labkit.figures.kit.entries import MANY, Entry
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.runs import speed
from labkit.records.questions.losses import epoch_results, loss_curve

if TYPE_CHECKING:
    import pandas as pd

POINTS = 300  # a panel shows no more; of many runs a quarter: a hundred are drawn at once
CURVES = 120  # so many runs have curves, and their histories read
FEW = 8  # above so many runs the unsmoothed lines would only be fog

_AXES = {
    "step": "step",
    "seconds": "seconds since the first step",
    "bytes": "bytes on the wire, all ranks",
}


def learning_panels(shown: Sequence[Entry]) -> tuple[list[Panel], list[Panel], str]:
    """Loss over steps, seconds and bytes; test results over the same; and the words for all."""
    import pandas as pd

    whole, shown = shown, chosen(shown)
    curves = {entry.key: loss_curve(entry.run.history) for entry in shown}
    # The more runs, the fewer points of each: what a browser draws stays about the same.
    points = POINTS if len(shown) <= FEW else POINTS // 2 if len(shown) <= MANY else POINTS // 4
    losses = pd.concat([thinned(c, points).assign(run=key) for key, c in curves.items()])
    found = [epoch_results(e.run, curves[e.key]).assign(run=e.key) for e in shown]
    epochs = pd.concat(found)
    words = "; ".join(f"{e.label}: {_in_words(e, curves[e.key])}" for e in shown)
    if len(shown) < len(whole):
        words = f"curves of {len(shown)} of {len(whole)} runs, evenly over all; {words}"
    # A task without classes is judged by its loss.
    judged = "val_accuracy" if "val_accuracy" in epochs else "val_loss"
    what = "Test accuracy" if judged == "val_accuracy" else "Test loss"
    tests = epochs.dropna(subset=[judged]) if judged in epochs else epochs.iloc[:0]
    look = SHARES | {"tickformat": ".0%"} if judged == "val_accuracy" else {}
    return (
        [_panel(shown, losses, losses, over, "smooth", "Training loss") for over in _AXES],
        [_panel(shown, losses, tests, over, judged, what, look) for over in _AXES],
        words,
    )


def chosen(shown: Sequence[Entry]) -> Sequence[Entry]:
    """Those whose curves are drawn: a panel has some hundred pixels, and thousands of runs a fog.

    Evenly over all, the first and the last among them, and those whose test results are extreme.
    """
    if len(shown) <= CURVES:
        return shown
    judged = [e for e in shown if e.metrics.get("test_accuracy") is not None]
    judged = judged or [e for e in shown if e.metrics.get("test_loss") is not None]
    name = "test_accuracy" if judged and judged[0].metrics.get("test_accuracy") else "test_loss"
    ends = [end(judged, key=lambda e: e.metrics[name]).key for end in (min, max) if judged]
    places = set(np.linspace(0, len(shown) - 1, CURVES - len(ends)).round().astype(int))
    return [e for place, e in enumerate(shown) if place in places or e.key in ends]


def thinned(table: pd.DataFrame, points: int = POINTS) -> pd.DataFrame:
    """So many rows, evenly over all; the first and the last among them."""
    # Each once: of a short table there are fewer rows than points.
    places = np.unique(np.linspace(0, len(table) - 1, points).round().astype(int))
    return table.iloc[places[: len(table)]]


def _panel(
    shown: Sequence[Entry],
    losses: pd.DataFrame,
    table: pd.DataFrame,
    over: str,
    y: str,
    what: str,
    look: Trace | None = None,
) -> Panel:
    """A panel whose note says which runs are not in it, and why."""
    is_loss = y == "smooth"
    totals = losses.groupby("run")["bytes"].max()
    sending = totals[totals > 0]
    if over == "seconds":  # need a gate
        table = table[~table["run"].isin([entry.key for entry in shown if entry.gate_failed])]
    elif over == "bytes":  # need a second worker
        table = table[table["run"].isin(sending.index)]
    # A row without a place on this axis may have one on another.
    table = table.dropna(subset=[over])
    faint = "loss" if is_loss and len(shown) <= FEW else ""
    # Epochs are few, and each is a measurement; steps are many.
    marks = not is_loss and len(shown) <= MANY
    looks = {entry.key: entry for entry in shown}
    refused = speed.refusals(shown) if over == "seconds" else ""
    empty = "no history" if is_loss else "no validation data"
    if over == "bytes" and len(losses):
        empty = "one worker sends nothing"
    unit = "loss, mean over ranks" if is_loss else what.lower()
    return Panel(
        title=f"{what} by {over}",
        x=_AXES[over],
        y=unit if over == "step" else "",
        traces=line_with_band(table, over, y, looks, marks=marks, faint=faint),
        note=refused or ("" if len(table) else empty),
        always_note=bool(refused),
        x_axis=amounts_axis(sending.min(), sending.max()) if over == "bytes" and len(table) else {},
        y_axis=look or {},
        link=over,
    )


def _in_words(entry: Entry, curve: pd.DataFrame) -> str:
    """`loss 2.3 → 0.21 in 60 steps and 0.3 s, test accuracy 0.95`."""
    parts = []
    if len(curve):
        ends = " → ".join(f"{curve['smooth'].iloc[place]:.3g}" for place in (0, -1))
        seconds = curve["seconds"].iloc[-1]  # not known of a curve that was logged as a list
        time = "" if entry.gate_failed or np.isnan(seconds) else f" and {seconds:.3g} s"
        parts.append(f"loss {ends} in {len(curve)} steps{time}")
    for key, words in (("test_accuracy", "test accuracy"), ("test_loss", "test loss")):
        if entry.metrics.get(key) is not None:
            parts.append(f"{words} {entry.metrics[key]:.3g}")
            break
    return ", ".join(parts) or "no curve"
