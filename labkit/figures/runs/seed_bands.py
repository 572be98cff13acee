"""Speed-up over workers as a line through the medians of seeds, in a band of their spread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from labkit.figures.kit.entries import transparent
from labkit.figures.runs.speed import Scaling
from labkit.records.run import flatten

# In these the runs of one line may differ: its x axis, what follows from it, and chance.
_ALONG = ("name", "workers", "batch_size", "seed", "repeats")


@dataclass(frozen=True)
class Band:
    """Runs that differ in workers and seeds only.

    Attributes:
        kind: "strong" or "weak".
        color: of its first run.
        keys: of its runs.
        workers, low, middle, high: by number of workers, speed-up of the slowest seed, the median
            seed and the fastest; shape (numbers of workers,).
        seeds: the most that any number of workers has.
    """

    kind: str
    color: str
    keys: tuple[str, ...]
    workers: tuple[int, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def bands(points: Sequence[Scaling]) -> list[Band]:
    """A band for each kind of run that was measured on two or more numbers of workers."""
    groups: dict[str, list[Scaling]] = {}
    for point in points:
        groups.setdefault(_line(point), []).append(point)
    found = []
    for group in groups.values():
        by_workers = {n: [p for p in group if p.workers == n] for n in _numbers(group)}
        if len(by_workers) > 1:
            found.append(_band(group, by_workers))
    return found


def band_traces(found: Sequence[Band], percent: bool) -> list[dict[str, Any]]:
    """The line of each band, and what lies between its seeds where it has several."""
    return [trace for band in found for trace in _traces(band, percent)]


def _line(point: Scaling) -> str:
    fields = {k: v for k, v in point.entry.run.experiment.items() if k not in _ALONG}
    batch = point.entry.run.experiment.get("batch_size", 0)
    each = batch if point.kind == "strong" else batch / point.workers
    return json.dumps([point.kind, each, flatten(fields)], sort_keys=True)


def _numbers(group: Sequence[Scaling]) -> list[int]:
    return sorted({point.workers for point in group})


def _band(group: Sequence[Scaling], by_workers: dict[int, list[Scaling]]) -> Band:
    speedups = {n: sorted(s for p in own for s in _of_seeds(p)) for n, own in by_workers.items()}
    keys = dict.fromkeys(point.entry.key for point in group)
    return Band(
        kind=group[0].kind,
        color=group[0].entry.color,
        keys=tuple(keys),
        workers=tuple(speedups),
        low=tuple(each[0] for each in speedups.values()),
        middle=tuple(median(by.speedup for by in own) for own in by_workers.values()),
        high=tuple(each[-1] for each in speedups.values()),
        seeds=max(
            max(len(own), own[0].entry.metrics.get("repeats", 1)) for own in by_workers.values()
        ),
    )


def _of_seeds(point: Scaling) -> list[float]:
    """The speed-up of a run; of repeats in one run, that of the fastest and of the slowest."""
    spread = (point.entry.metrics.get("spread") or {}).get("step_ms.median")
    middle = point.entry.metrics["step_ms"]["median"]
    return [point.speedup * middle / step for step in spread or [middle]]


def _traces(band: Band, percent: bool) -> list[dict[str, Any]]:
    def scaled(values: Sequence[float]) -> list[float]:
        if not percent:
            return list(values)
        return [100 * value / n for value, n in zip(values, band.workers, strict=True)]

    common: dict[str, Any] = {
        "x": list(band.workers),
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": {"runs": list(band.keys)},
        "name": f"{band.kind} scaling",
    }
    dash = "solid" if band.kind == "strong" else "dot"
    line = {"y": scaled(band.middle), "line": {"color": band.color, "width": 1.5, "dash": dash}}
    if band.seeds < 2:
        return [common | line]
    # There along the slowest seeds and back along the fastest: one shape, whatever is hidden.
    edge = {"x": [*band.workers, *band.workers[::-1]], "line": {"width": 0}}
    fill = {"fill": "toself", "fillcolor": transparent(band.color, 0.2)}
    return [common | edge | fill | {"y": scaled(band.low) + scaled(band.high)[::-1]}, common | line]
