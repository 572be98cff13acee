"""Learning curves: the loss of steps, and results of epochs, over one of three axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.units import amounts_axis, bytes_text, plural
from labkit.figures.kit.axes import SHARES
from labkit.figures.kit.entries import MANY, Entry
from labkit.figures.kit.marks import line_over_band
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.runs import speed
from labkit.records.analysis.losses import epoch_results, loss_curve
from labkit.records.run import logged, own_results

if TYPE_CHECKING:
    import pandas as pd

POINTS = 300  # a panel shows no more; of many runs a quarter: a hundred are drawn at once
CURVES = 240  # so many runs have curves, and their histories read
MOST = 9000  # points of all curves of a panel; what a browser draws stays about the same
OWN = 6  # so many names of the user's own have a panel
Tables: TypeAlias = "Mapping[str, pd.DataFrame]"  # by the keys of entries
FEW = 8  # above so many runs the unsmoothed lines would only be fog
_TOLD = 3  # so many of what coincides are told
SAME = 1e-4  # of the greatest loss: curves that are so close are one line on any screen

AXES = {
    "step": "step",
    "seconds": "seconds since the first step",
    "bytes": "bytes since the first step, all ranks",
}


def learning_panels(shown: Sequence[Entry]) -> tuple[list[list[Panel]], list[str], str]:
    """Loss and test results over steps, with their places on other axes; remarks; words.

    Below them, two in a row, the curves of the user's own.
    """
    whole, shown = shown, chosen(shown)
    curves = {entry.key: loss_curve(entry.run.history) for entry in shown}
    points = POINTS if len(shown) <= FEW else POINTS // 2 if len(shown) <= MANY else POINTS // 4
    points = min(points, MOST // len(shown))
    losses = {key: thinned(curve, points) for key, curve in curves.items()}
    found = {e.key: epoch_results(e.run, curves[e.key]) for e in shown}
    words = "; ".join(f"{e.label}: {_in_words(e, curves[e.key])}" for e in shown)
    if len(shown) < len(whole):
        words = f"curves of {len(shown)} of {len(whole)} runs, evenly over all; {words}"
    # A task without classes is judged by its loss.
    judged = "val_accuracy" if any("val_accuracy" in t for t in found.values()) else "val_loss"
    what = "Test accuracy" if judged == "val_accuracy" else "Test loss"
    tests = {key: own.dropna(subset=[judged]) for key, own in found.items() if judged in own}
    look = SHARES | {"tickformat": ".0%"} if judged == "val_accuracy" else {}
    axes = _axes(losses)
    panels = [
        _panel(shown, losses, "smooth", "Training loss", axes),
        _panel(shown, tests, judged, what, axes, look),
    ]
    names = _own_names(shown, found)
    panels += [
        _panel(shown, _of_name(found, name, points), name, name, axes) for name in names[:OWN]
    ]
    remarks = [*_silent(shown, losses), *_coinciding(shown, curves)]
    remarks += [f"curves of {OWN} of {len(names)} names of their own"] if names[OWN:] else []
    return [panels[row : row + 2] for row in range(0, len(panels), 2)], remarks, words


def _own_names(shown: Sequence[Entry], found: Tables) -> list[str]:
    """Under which names of the user's own there are curves; the training loss has its panel."""
    every = dict.fromkeys(name for entry in shown for name in logged(entry.run))
    return [
        name
        for name in every
        if name not in ("loss", "epoch", *AXES)
        and any(name in own and own[name].count() > 1 for own in found.values())
    ]


def _of_name(found: Tables, name: str, points: int) -> Tables:
    known = {key: own.dropna(subset=[name]) for key, own in found.items() if name in own}
    return {key: thinned(own, points) for key, own in known.items()}


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


def _axes(losses: Tables) -> dict[str, Trace]:
    """What the x axis is like over each of the three; bytes only where any were sent."""
    sent = [most for own in losses.values() if len(own) and (most := own["bytes"].max()) > 0]
    axes: dict[str, Trace] = {over: {"title": {"text": title}} for over, title in AXES.items()}
    if not sent:
        del axes["bytes"]
        return axes
    return axes | {"bytes": axes["bytes"] | amounts_axis(min(sent), max(sent))}


def _panel(
    shown: Sequence[Entry],
    tables: Tables,
    y: str,
    what: str,
    axes: dict[str, Trace],
    look: Trace | None = None,
) -> Panel:
    is_loss = y == "smooth"
    faint = "loss" if is_loss and len(shown) <= FEW else ""
    # Epochs are few, and each is a measurement; steps are many.
    marks = not is_loss and len(shown) <= MANY
    refused = speed.refusals(shown)
    traces = []
    for entry in shown:
        own = tables.get(entry.key, ())
        if len(own):
            drawn = line_over_band(own, "step", y, entry, marks=marks, faint=faint)
            # Of a band and its line, or of what is smoothed and the line.
            raw = ["loss_low", "loss_high", "loss"] if len(drawn) == 3 else ["loss"] * len(drawn)
            places = _over_all(own, entry, axes)
            for trace, name in zip(drawn, raw, strict=True):
                plain = {"raw": _short(own[name])} if is_loss else {}
                traces.append(trace | {"meta": {"run": entry.key, "over": places} | plain})
    empty = "no history" if is_loss else "no validation data"
    return Panel(
        title=what,
        x=AXES["step"],
        y="loss, mean over ranks" if is_loss else what if what == y else what.lower(),
        traces=traces,
        note=f"over seconds: {refused}" if refused else "" if traces else empty,
        always_note=bool(refused),
        y_axis=look or {},
        link="step",
        over=axes,
    )


def _over_all(
    own: pd.DataFrame, entry: Entry, axes: dict[str, Trace]
) -> dict[str, list[float | None]]:
    """Where a run's points are over the other axes: without a gate no seconds, alone no bytes."""
    over = [
        name for name in axes if name != "step" and not (name == "seconds" and entry.gate_failed)
    ]
    return {name: _short(own[name]) for name in over if own[name].max() > 0}


def _short(values: pd.Series[float]) -> list[float | None]:
    """Numbers in five figures, for they are text in the page."""
    return [float(f"{v:.5g}") if np.isfinite(v) else None for v in np.asarray(values, float)]


def _silent(shown: Sequence[Entry], losses: Tables) -> list[str]:
    """Why there are no bytes, where there are none; what was sent once, where that was much."""
    several = [entry for entry in shown if entry.metrics.get("workers", 1) > 1]
    if not several or any(own["bytes"].max() > 0 for own in losses.values()):
        return []
    algorithms = {(entry.metrics.get("exchange") or {}).get("algorithm") for entry in several}
    why = "nothing was sent after the first step"
    if "shared_memory" in algorithms:
        why = "the exchange is in shared memory, and no link would carry it"
    return [f"no axis of bytes: {why}"]


def _coinciding(shown: Sequence[Entry], curves: dict[str, pd.DataFrame]) -> list[str]:
    """`workers 1 and workers 2 coincide to 1e-7`: lines that nobody can see apart."""
    groups: list[list[Entry]] = []
    worst: list[float] = []
    for entry in shown:
        own = curves[entry.key]["loss"].to_numpy(float)
        for place, group in enumerate(groups):
            other = curves[group[0].key]["loss"].to_numpy(float)
            gap = _gap(own, other)
            if gap <= SAME:
                group.append(entry)
                worst[place] = max(worst[place], gap)
                break
        else:
            groups.append([entry])
            worst.append(0.0)
    said = [
        f"{' and '.join(e.label for e in group[:3])}{_more(len(group) - 3)} coincide"
        f"{f' to {gap:.0e}' if gap else ' exactly'}"
        for group, gap in zip(groups, worst, strict=True)
        if len(group) > 1
    ]
    more = len(said) - _TOLD
    return said[:_TOLD] + ([f"{more} more lie on one another"] if more > 0 else [])


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two losses, in parts of the greatest; infinite for other steps."""
    if not len(one) or len(one) != len(other) or not np.isfinite(one).all():
        return np.inf
    return float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30))


def _in_words(entry: Entry, curve: pd.DataFrame) -> str:
    """`loss 2.3 → 0.21 in 60 steps and 0.3 s, test accuracy 0.95`."""
    parts = []
    if len(curve):
        ends = " → ".join(f"{curve['smooth'].iloc[place]:.3g}" for place in (0, -1))
        seconds = curve["seconds"].iloc[-1]  # not known of a curve that was logged as a list
        time = "" if entry.gate_failed or np.isnan(seconds) else f" and {seconds:.3g} s"
        sent = curve["bytes"].iloc[-1]
        spent = f", {bytes_text(sent)}" if sent > 0 else ""
        parts.append(f"loss {ends} in {plural(len(curve), 'step')}{time}{spent}")
    for key, words in (("test_accuracy", "test accuracy"), ("test_loss", "test loss")):
        if entry.metrics.get(key) is not None:
            parts.append(f"{words} {entry.metrics[key]:.3g}")
            break
    own = islice(own_results(entry.run).items(), OWN)
    parts += [f"{name} {value:.3g}" for name, value in own]
    return ", ".join(parts) or "no curve"
