"""Accuracy against bytes and against seconds, and which runs no other run beats in all three."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit import entries as naming
from labkit.figures.kit.entries import INK, OVERSUBSCRIBED, Entry, clock_and_network
from labkit.figures.kit.panels import Panel
from labkit.figures.runs.speed import refusals
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

Values = dict[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Point:
    """What a run reached and spent: (mean, least, greatest) over its seeds.

    `values` has "accuracy"; "bytes", that all ranks put on the wire in the whole training;
    "seconds" of training after the first step, unless the equivalence gate failed.
    """

    entry: Entry
    values: Values

    @property
    def network(self) -> str:
        """The emulated network: seconds on another one are another matter."""
        return str(self.entry.metrics.get("network"))

    def beats(self, other: Point, measures: Sequence[str]) -> bool:
        """Whether it is at least as good in all of these, and better in one."""
        mine, yours = (each.goodness(measures) for each in (self, other))
        return bool((mine >= yours).all() and (mine > yours).any())

    def goodness(self, measures: Sequence[str]) -> np.ndarray:
        """The means, with costs below zero."""
        signs = [1 if name == "accuracy" else -1 for name in measures]
        return np.array(signs) * [self.values[name][0] for name in measures]


def pareto(runs: Iterable[Run] | Run) -> Figure:
    """Test accuracy over bytes on the wire and over seconds, with the Pareto front of each panel.

    Error bars span the seeds. A filled marker: no other run on its network is at least as good in
    accuracy, bytes and seconds, and better in one. A run whose equivalence gate failed has no
    seconds. Raises LabkitError where there are no runs.
    """
    from labkit.figures.kit.canvas import draw

    shown = naming.entries([runs] if isinstance(runs, Run) else runs)
    found = points(shown)
    best = {each.entry.key for each in front(found, ("accuracy", "bytes", "seconds"))}
    panels = [_panel(found, cost, best, refusals(shown)) for cost in ("bytes", "seconds")]
    missing = [e.label for e in shown if e.key not in {each.entry.key for each in found}]
    remarks = [
        "filled: no run on its network is better in accuracy, bytes and seconds; bars: seeds"
    ]
    remarks += [f"not completed, or without test accuracy: {', '.join(missing)}"] if missing else []
    if any(entry.metrics.get("oversubscribed") for entry in shown):
        remarks.append(OVERSUBSCRIBED)
    title = f"Accuracy × bytes × seconds · {clock_and_network(shown)}"
    words = [_in_words(each, best) for each in found]
    alt = ". ".join(part for part in [title, *remarks, *words, refusals(shown)] if part) + "."
    return draw([panels], shown, title, " · ".join(remarks), alt, plot=280)


def points(shown: Sequence[Entry]) -> list[Point]:
    """The runs that have a test accuracy, with what they spent."""
    found = []
    for entry in shown:
        seeds = [s for s in seeds_of(entry.run) if s.metrics.get("test_accuracy") is not None]
        if seeds:
            rows = [_spent(seed, entry.gate_failed) for seed in seeds]
            values = {
                name: (float(np.mean(each)), min(each), max(each))
                for name in rows[0]
                if all(name in row for row in rows)  # a seed of one step has no seconds
                for each in [[row[name] for row in rows]]
            }
            found.append(Point(entry, values))
    return found


def front(found: Sequence[Point], measures: Sequence[str]) -> list[Point]:
    """The points with all of these measures that no other such point beats.

    Where seconds are among them, only runs on the same network stand against each other.
    """
    whole = [each for each in found if set(measures) <= set(each.values)]

    def rivals(one: Point) -> list[Point]:
        return [o for o in whole if "seconds" not in measures or o.network == one.network]

    return [each for each in whole if not any(o.beats(each, measures) for o in rivals(each))]


def _spent(seed: Run, gate_failed: bool) -> dict[str, float]:
    metrics = seed.metrics
    spent = {
        "accuracy": float(metrics["test_accuracy"]),
        "bytes": float(seed.history["wire_bytes"].sum()),
    }
    # What the first step takes to trace and compile stands apart, as in all figures.
    seconds = metrics["train_seconds"] - metrics.get("first_step_ms", 0.0) / 1e3
    if not gate_failed and seconds > 1e-9 * metrics["train_seconds"]:  # not of one step alone
        spent["seconds"] = seconds
    return spent


def _panel(found: Sequence[Point], cost: str, best: set[str], refused: str) -> Panel:
    # A logarithm of nothing cannot be drawn: one worker sends no bytes.
    drawn = [each for each in found if each.values.get(cost, (0.0, 0.0, 0.0))[1] > 0]
    note = "\n".join(
        part
        for part in (
            refused if cost == "seconds" else "",
            "" if drawn else f"no run with a test accuracy and {cost}",
        )
        if part
    )
    x = {"bytes": "bytes on the wire, all ranks", "seconds": "seconds after the first step"}[cost]
    axis, look = {"bytes": bytes_axis, "seconds": seconds_axis}[cost], {}
    if drawn:
        edges = [each.values[cost][1:] for each in drawn]
        low, high = min(least for least, _ in edges), max(most for _, most in edges)
        # Room for whole ticks, where all runs spend about the same.
        look = axis(low / 2, high * 2)
    return Panel(
        title=f"Accuracy by {cost} of the whole training\nline: Pareto front",
        x=x,
        y="test accuracy",
        traces=[*_front_traces(drawn, cost), *(_marker(p, cost, best) for p in drawn)],
        note=note,
        always_note=bool(note),
        x_axis=look,
        y_axis={"tickformat": ".1%"},
    )


def _front_traces(drawn: Sequence[Point], cost: str) -> list[dict[str, Any]]:
    """Steps from the cheapest run to the best; by seconds, a front a network."""
    best = sorted(front(drawn, ("accuracy", cost)), key=lambda each: each.values[cost][0])
    if cost == "bytes":
        return [_front_trace(best, cost)] if best else []
    networks = dict.fromkeys(each.network for each in best)
    return [_front_trace([p for p in best if p.network == name], cost) for name in networks]


def _front_trace(best: Sequence[Point], cost: str) -> dict[str, Any]:
    return {
        "x": [each.values[cost][0] for each in best],
        "y": [each.values["accuracy"][0] for each in best],
        "mode": "lines",
        "line": {"color": INK, "dash": "dot", "width": 1.5, "shape": "hv"},
        "name": "Pareto front",
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _marker(point: Point, cost: str, best: set[str]) -> dict[str, Any]:
    entry, text = point.entry, {"bytes": bytes_text, "seconds": seconds_text}[cost]
    symbol = entry.symbol if entry.key in best else f"{entry.symbol}-open"
    x, y, line = point.values[cost], point.values["accuracy"], {"width": 2, "color": entry.color}
    return {
        "x": [x[0]],
        "y": [y[0]],
        "mode": "markers",
        "marker": {"color": entry.color, "symbol": symbol, "size": 11, "line": line},
        "error_x": _bar(x, entry.color),
        "error_y": _bar(y, entry.color),
        "hovertemplate": f"%{{y:.2%}}, {text(x[0])}",
        "showlegend": False,
    } | entry.style


def _bar(value: tuple[float, float, float], color: str) -> dict[str, Any]:
    middle, low, high = value
    ends = {"array": [high - middle], "arrayminus": [middle - low], "symmetric": False}
    return ends | {"color": color, "thickness": 1.5, "visible": high > low}


def _in_words(point: Point, best: set[str]) -> str:
    values, label = point.values, point.entry.label
    said = [f"accuracy {values['accuracy'][0]:.2%}", bytes_text(values["bytes"][0])]
    if "seconds" in values:
        said.append(seconds_text(values["seconds"][0]))
    on = " (on the front)" if point.entry.key in best else ""
    return f"{label}: {', '.join(said)}{on}"
