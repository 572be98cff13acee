"""Learning curves: loss per step and test results per epoch, over steps, seconds or bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.units import amounts_axis, bytes_text, plural
from labkit.figures.kit.entries import MANY, RunEntry
from labkit.figures.kit.marks import line_over_band
from labkit.figures.kit.panels import SHARES, Panel, Trace
from labkit.figures.runs import speed
from labkit.records.analysis.curves import epoch_results, loss_curve
from labkit.records.run import logged_names, logged_results

if TYPE_CHECKING:
    import pandas as pd

# A curve has at most `POINTS` points. With many runs, the limit of points is a half or a quarter.
POINTS = 300
CURVES = 240  # maximum number of runs with curves; only these runs' histories are read
MOST = 9000  # maximum number of points in a panel, to limit drawing time
OWN = 6  # maximum number of user-defined metrics with a panel
# `Tables` maps the key of each legend entry to the table of its run.
Tables: TypeAlias = "Mapping[str, pd.DataFrame]"
FEW = 8  # A figure with more runs has no unsmoothed lines, because the lines would hide each other.
_MOST_GROUPS = 3  # maximum number of groups of coinciding curves that a remark lists
SAME = 1e-4  # curves coincide if they differ by less than this fraction of the loss

AXES = {
    "step": "step",
    "seconds": "seconds since the first step",
    "bytes": "bytes sent by all ranks since the first step",
}


def learning_panels(entries: Sequence[RunEntry]) -> tuple[list[list[Panel]], list[str], str]:
    """Return panels (loss, test results, user-defined metrics), remarks, and alternative text.

    The panels are arranged in rows of two. Buttons switch the x axis of all panels between steps,
    seconds and bytes.
    """
    whole, entries = entries, select_curves(entries)
    curves = {entry.key: loss_curve(entry.run.history) for entry in entries}
    points = POINTS if len(entries) <= FEW else POINTS // 2 if len(entries) <= MANY else POINTS // 4
    points = min(points, MOST // len(entries))
    losses = {key: thin_rows(curve, points) for key, curve in curves.items()}
    epochs = {e.key: epoch_results(e.run, curves[e.key]) for e in entries}
    words = "; ".join(f"{e.label}: {_in_words(e, curves[e.key])}" for e in entries)
    if len(entries) < len(whole):
        words = (
            f"the figure shows curves of {len(entries)} of {len(whole)} runs, evenly "
            f"selected; {words}"
        )
    # If the task has no classes, the panel shows the test loss instead of the test accuracy.
    judged = "val_accuracy" if any("val_accuracy" in t for t in epochs.values()) else "val_loss"
    what = "Test accuracy" if judged == "val_accuracy" else "Test loss"
    tests = {key: rows.dropna(subset=[judged]) for key, rows in epochs.items() if judged in rows}
    look = SHARES | {"tickformat": ".0%"} if judged == "val_accuracy" else {}
    axes = _axes(losses)
    panels = [
        _panel(entries, losses, "smooth", "Training loss", axes),
        _panel(entries, tests, judged, what, axes, look),
    ]
    names = _user_metrics(entries, epochs)
    panels += [
        _panel(entries, _rows_with(epochs, name, points), name, name, axes) for name in names[:OWN]
    ]
    remarks = [*_no_bytes_reason(entries, losses), *_coinciding_curves(entries, curves)]
    remarks += (
        [f"the figure shows curves of {OWN} of {len(names)} user-defined metrics"]
        if names[OWN:]
        else []
    )
    return [panels[row : row + 2] for row in range(0, len(panels), 2)], remarks, words


def _user_metrics(shown: Sequence[RunEntry], results: Tables) -> list[str]:
    """Return the names of user-defined metrics with at least two values, which form a curve."""
    every = dict.fromkeys(name for entry in shown for name in logged_names(entry.run))
    return [
        name
        for name in every
        if name not in ("loss", "epoch", *AXES)
        and any(name in table and table[name].count() > 1 for table in results.values())
    ]


def _rows_with(results: Tables, name: str, points: int) -> Tables:
    known = {key: table.dropna(subset=[name]) for key, table in results.items() if name in table}
    return {key: thin_rows(table, points) for key, table in known.items()}


def select_curves(entries: Sequence[RunEntry]) -> Sequence[RunEntry]:
    """Select the runs whose curves are drawn, because thousands of curves would hide each other.

    The selected runs are evenly spaced and include the first and last run. The selection also
    includes the runs with the best and worst test result.
    """
    if len(entries) <= CURVES:
        return entries
    judged = [e for e in entries if e.metrics.get("test_accuracy") is not None]
    judged = judged or [e for e in entries if e.metrics.get("test_loss") is not None]
    name = "test_accuracy" if judged and judged[0].metrics.get("test_accuracy") else "test_loss"
    ends = [end(judged, key=lambda e: e.metrics[name]).key for end in (min, max) if judged]
    places = set(np.linspace(0, len(entries) - 1, CURVES - len(ends)).round().astype(int))
    return [e for place, e in enumerate(entries) if place in places or e.key in ends]


def thin_rows(table: pd.DataFrame, points: int = POINTS) -> pd.DataFrame:
    """Return at most `points` evenly spaced rows, including the first and the last row."""
    # `np.unique` removes duplicate positions, which occur if a table has fewer rows than `points`.
    places = np.unique(np.linspace(0, len(table) - 1, points).round().astype(int))
    return table.iloc[places[: len(table)]]


def _axes(losses: Tables) -> dict[str, Trace]:
    """Return the x axes for steps and seconds, and for bytes if any bytes were sent."""
    sent = [most for curve in losses.values() if len(curve) and (most := curve["bytes"].max()) > 0]
    axes: dict[str, Trace] = {over: {"title": {"text": title}} for over, title in AXES.items()}
    if not sent:
        del axes["bytes"]
        return axes
    return axes | {"bytes": axes["bytes"] | amounts_axis(min(sent), max(sent))}


def _panel(
    shown: Sequence[RunEntry],
    tables: Tables,
    y: str,
    what: str,
    axes: dict[str, Trace],
    look: Trace | None = None,
) -> Panel:
    is_loss = y == "smooth"
    faint = "loss" if is_loss and len(shown) <= FEW else ""
    # Epoch results have markers, because epochs are few; step losses have none, because steps are
    # too many.
    marks = not is_loss and len(shown) <= MANY
    refused = speed.refusals(shown)
    traces = []
    for entry in shown:
        results = tables.get(entry.key, ())
        if len(results):
            drawn = line_over_band(results, "step", y, entry, marks=marks, faint=faint)
            # `raw` names the column of unsmoothed values for each drawn trace. The list `drawn` may
            # contain three traces. The three traces are the lower edge, the upper edge and the line
            # of a band.
            raw = ["loss_low", "loss_high", "loss"] if len(drawn) == 3 else ["loss"] * len(drawn)
            places = _over_all(results, entry, axes)
            for trace, name in zip(drawn, raw, strict=True):
                plain = {"raw": _rounded(results[name])} if is_loss else {}
                traces.append(trace | {"meta": {"run": entry.key, "over": places} | plain})
    empty = "no history" if is_loss else "no validation data"
    return Panel(
        title=what,
        x=AXES["step"],
        y="loss, mean over ranks" if is_loss else what if what == y else what.lower(),
        traces=traces,
        note=f"no curves over seconds are shown: {refused}" if refused else "" if traces else empty,
        always_note=bool(refused),
        y_axis=look or {},
        link="step",
        over=axes,
    )


def _over_all(
    results: pd.DataFrame, entry: RunEntry, axes: dict[str, Trace]
) -> dict[str, list[float | None]]:
    """Return a run's x values on all axes but steps; a run that failed its check has no seconds."""
    over = [
        name
        for name in axes
        if name != "step" and not (name == "seconds" and entry.equivalence_failed)
    ]
    return {name: _rounded(results[name]) for name in over if results[name].max() > 0}


def _rounded(values: pd.Series[float]) -> list[float | None]:
    """Round the values to five digits, because an HTML page stores them as text."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in np.asarray(values, float)]


def _no_bytes_reason(shown: Sequence[RunEntry], losses: Tables) -> list[str]:
    """Return why the figure has no axis of bytes, or an empty list."""
    several = [entry for entry in shown if entry.metrics.get("workers", 1) > 1]
    if not several or any(curve["bytes"].max() > 0 for curve in losses.values()):
        return []
    algorithms = {(entry.metrics.get("exchange") or {}).get("algorithm") for entry in several}
    why = "ranks sent no bytes after the first step"
    if "shared_memory" in algorithms:
        why = "ranks exchange gradients through shared memory, so no bytes are sent over a network"
    return [f"the figure has no axis of bytes: {why}"]


def _coinciding_curves(shown: Sequence[RunEntry], curves: dict[str, pd.DataFrame]) -> list[str]:
    """Return a remark on equal curves, such as `workers 1 and workers 2 coincide to 1e-7`."""
    groups: list[list[RunEntry]] = []
    worst: list[float] = []
    for entry in shown:
        losses = curves[entry.key]["loss"].to_numpy(float)
        for place, group in enumerate(groups):
            other = curves[group[0].key]["loss"].to_numpy(float)
            gap = _gap(losses, other)
            if gap <= SAME:
                group.append(entry)
                worst[place] = max(worst[place], gap)
                break
        else:
            groups.append([entry])
            worst.append(0.0)
    details = [
        f"{' and '.join(e.label for e in group[:3])}{_more_text(len(group) - 3)} coincide"
        f"{f' to {gap:.0e}' if gap else ' exactly'}"
        for group, gap in zip(groups, worst, strict=True)
        if len(group) > 1
    ]
    more = len(details) - _MOST_GROUPS
    return details[:_MOST_GROUPS] + (
        [f"{more} more groups of runs have coinciding curves"] if more > 0 else []
    )


def _more_text(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    """Return the largest relative difference of two curves; infinite if their lengths differ."""
    if not len(one) or len(one) != len(other) or not np.isfinite(one).all():
        return np.inf
    return float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30))


def _in_words(entry: RunEntry, curve: pd.DataFrame) -> str:
    """Describe a curve, such as `loss 2.3 → 0.21 in 60 steps and 0.3 s, test accuracy 0.95`."""
    parts = []
    if len(curve):
        ends = " → ".join(f"{curve['smooth'].iloc[place]:.3g}" for place in (0, -1))
        # Users may log a curve as a list of losses. Such a curve has NaN as its seconds.
        seconds = curve["seconds"].iloc[-1]
        time = "" if entry.equivalence_failed or np.isnan(seconds) else f" and {seconds:.3g} s"
        sent = curve["bytes"].iloc[-1]
        spent = f", {bytes_text(sent)}" if sent > 0 else ""
        parts.append(f"loss {ends} in {plural(len(curve), 'step')}{time}{spent}")
    for key, words in (("test_accuracy", "test accuracy"), ("test_loss", "test loss")):
        if entry.metrics.get(key) is not None:
            parts.append(f"{words} {entry.metrics[key]:.3g}")
            break
    metrics = islice(logged_results(entry.run).items(), OWN)
    parts += [f"{name} {value:.3g}" for name, value in metrics]
    return ", ".join(parts) or "no curve"
