"""Speeds: samples a second, speed-up and efficiency against one worker; none for a failed gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.figures.kit.entries import INK, MANY, Entry, safe_text
from labkit.records.run import flatten

# What makes the work of a step: a baseline has to do the same. Of the strategy and the network
# one worker uses nothing, so a baseline with the same ones is preferred but not demanded.
_WORK = ("model", "dataset", "optimizer", "precision", "loss", "threads", "clock", "feed")


@dataclass(frozen=True)
class Scaling:
    r"""One run against its baseline: \(E = T_1 / (n T_n)\) strong, \(E = T_1 / T_n\) weak.

    low and high are the same with the 90th and 10th percentile of the run's step time.
    """

    entry: Entry
    baseline: Entry
    kind: str
    workers: int
    speedup: float
    low: float
    high: float


NO_BASELINE = "no run with workers=1 and otherwise equal parameters to compare with"
_NAMED = 2  # so many failed gates are named in a panel; the table has all


def refusals(shown: Sequence[Entry]) -> str:
    """One line for each run that may not show a speed; empty where all may."""
    failed = [entry for entry in shown if entry.gate_failed]
    lines = [f"{entry.label}: {refused(entry)}" for entry in failed[:_NAMED]]
    return "\n".join(lines + ([f"and {len(failed) - _NAMED} more"] if failed[_NAMED:] else []))


def refused(entry: Entry) -> str:
    """The sentence that stands where a speed would."""
    difference = (entry.metrics.get("equivalence") or {}).get("max_abs_difference")
    size = "" if difference is None else f" (max |Δ| {difference:.2g})"
    return f"no speed figure: equivalence gate failed{size}"


def throughput_traces(shown: Sequence[Entry]) -> list[dict[str, Any]]:
    """A bar a run; the whisker reaches from the speed of a slow step (p90) to a fast one (p10)."""
    traces = []
    many, hairline = len(shown) > MANY, {"thickness": 0.5, "width": 0}
    for place, entry in enumerate(shown):
        speed = entry.metrics.get("samples_per_second")
        if speed is None or entry.gate_failed:
            continue
        step = entry.metrics.get("step_ms") or {}
        middle = step.get("median") or 0.0
        up = speed * (middle / step["p10"] - 1) if step.get("p10") else 0.0
        down = speed * (1 - middle / step["p90"]) if step.get("p90") else 0.0
        whisker = {"array": [max(up, 0.0)], "arrayminus": [max(down, 0.0)], "symmetric": False}
        bar = {
            "type": "bar",
            "x": [place],
            "y": [speed],
            "marker": {"color": entry.color} | ({} if many else _hatch(entry)),
            "error_y": whisker | {"color": INK} | (hairline if many else {"thickness": 1.5}),
            "hovertemplate": "%{y:,.0f} samples/s",
            "showlegend": False,
        }
        traces.append(bar | entry.style)
    return traces


def scalings(shown: Sequence[Entry]) -> list[Scaling]:
    """Each run against a run with workers=1 and otherwise equal parameters, where there is one."""
    usable = [e for e in shown if _median(e) and not e.gate_failed]
    found = []
    for entry in usable:
        batch, workers = entry.run.experiment.get("batch_size"), _workers(entry)
        if not batch:
            continue
        for kind, wanted in (("strong", batch), ("weak", batch / workers)):
            baseline = _baseline(entry, usable, wanted)
            if baseline is not None and (workers > 1 or kind == "strong"):
                found.append(_scaling(entry, baseline, kind, workers))
    # A lone baseline says nothing about scaling.
    return found if any(point.workers > 1 for point in found) else []


def scaling_traces(points: Sequence[Scaling], percent: bool) -> list[dict[str, Any]]:
    """A marker a run, filled for strong scaling, open for weak; the ideal as a dashed line."""
    if not points:
        return []
    most = max(point.workers for point in points)
    ideal = {
        "x": [1, most],
        "y": [100, 100] if percent else [1, most],
        "mode": "lines",
        "line": {"color": INK, "dash": "dash", "width": 1},
        "name": "ideal",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return [ideal, *(_marker(point, percent) for point in points)]


def _marker(point: Scaling, percent: bool) -> dict[str, Any]:
    scale = 100 / point.workers if percent else 1.0
    value, unit = point.speedup * scale, " %" if percent else ""
    whisker = {
        "array": [point.high * scale - value],
        "arrayminus": [value - point.low * scale],
        "symmetric": False,
        "thickness": 1.5,
        "color": point.entry.color,
    }
    symbol = point.entry.symbol if point.kind == "strong" else f"{point.entry.symbol}-open"
    return {
        "x": [point.workers],
        "y": [value],
        "mode": "markers",
        "marker": {"color": point.entry.color, "symbol": symbol, "size": 10},
        "error_y": whisker,
        "hovertemplate": f"%{{y:.3g}}{unit} {point.kind}, against "
        f"{safe_text(point.baseline.label)}",
        "showlegend": False,
    } | point.entry.style


def kinds(points: Sequence[Scaling]) -> str:
    """What the markers are: `● strong scaling: same global batch`."""
    found = {point.kind for point in points if point.workers > 1}
    if found == {"strong", "weak"}:
        return "● strong, ○ weak scaling"
    words = {
        "strong": "● strong scaling: same global batch",
        "weak": "○ weak scaling: same local batch",
    }
    return "".join(words[kind] for kind in found)


def throughput_in_words(shown: Sequence[Entry]) -> str:
    """Every run's samples a second, or why it has none."""
    parts = []
    for entry in shown:
        speed = entry.metrics.get("samples_per_second")
        if entry.gate_failed:
            parts.append(f"{entry.label}: {refused(entry)}")
        elif speed is not None:
            parts.append(f"{entry.label}: {speed:,.0f} samples/s")
    return "; ".join(parts)


def speedup_in_words(points: Sequence[Scaling]) -> str:
    """Every run's speed-up and efficiency."""
    return "; ".join(
        f"{point.entry.label}: speed-up {point.speedup:.2f} on {point.workers} workers "
        f"({point.kind}, efficiency {100 * point.speedup / point.workers:.0f} %)"
        for point in points
        if point.workers > 1
    )


def _scaling(entry: Entry, baseline: Entry, kind: str, workers: int) -> Scaling:
    # Strong: the same batch in less time. Weak: n times the batch, so n times the work.
    work = (1 if kind == "strong" else workers) * _median(baseline)
    step = entry.metrics["step_ms"]
    speedup = work / step["median"]
    low, high = (work / step[edge] if step.get(edge) else speedup for edge in ("p90", "p10"))
    return Scaling(entry, baseline, kind, workers, speedup, min(low, speedup), max(high, speedup))


def _baseline(entry: Entry, usable: Sequence[Entry], batch: float) -> Entry | None:
    """A run of one worker that does the same work on this global batch; itself where it is one."""
    candidates = [
        other
        for other in usable
        if _workers(other) == 1
        and other.run.experiment.get("batch_size") == batch
        and _work(other) == _work(entry)
    ]
    if entry in candidates:
        return entry
    # Same strategy and network first: False sorts before True.
    return min(candidates, key=lambda other: _unlike(other, entry), default=None)


def _unlike(one: Entry, other: Entry) -> bool:
    names = ("strategy", "network")
    return any(one.run.experiment.get(name) != other.run.experiment.get(name) for name in names)


def _work(entry: Entry) -> dict[str, Any]:
    flat = flatten(entry.run.experiment)
    return {key: value for key, value in flat.items() if key.split(".")[0].startswith(_WORK)}


def _workers(entry: Entry) -> int:
    return int(entry.run.experiment.get("workers", 1))


def _median(entry: Entry) -> float:
    return float((entry.metrics.get("step_ms") or {}).get("median") or 0.0)


def _hatch(entry: Entry) -> dict[str, Any]:
    shapes = {"solid": "", "dash": "/", "dot": ".", "dashdot": "x"}
    return {"pattern": {"shape": shapes[entry.dash]}}
