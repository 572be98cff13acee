"""Speeds of runs: samples per second, speed-up over one worker, and parallel efficiency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from labkit.figures.kit.entries import LineStyle, RunEntry, safe_text
from labkit.figures.kit.marks import bars, line_with_band, points_with_bars, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.records.analysis.scaling import scalings, seed_bands

if TYPE_CHECKING:
    import pandas as pd


NO_BASELINE = "no baseline: no run with workers=1 has the same other parameters"
_NAMED = 2  # greatest number of failed equivalence checks that a panel names
_KINDS = {
    "strong": "● strong scaling: same global batch",
    "weak": "○ weak scaling: same local batch",
}


def refusals(entries: Sequence[RunEntry]) -> str:
    """Return a line for each run that has no speed, because its equivalence check failed."""
    failed = [entry for entry in entries if entry.equivalence_failed]
    lines = [f"{entry.label}: {refusal(entry)}" for entry in failed[:_NAMED]]
    return "\n".join(lines + ([f"and {len(failed) - _NAMED} more"] if failed[_NAMED:] else []))


def refusal(entry: RunEntry) -> str:
    """Return the text shown instead of the speed of a run that failed its equivalence check."""
    difference = (entry.metrics.get("equivalence") or {}).get("max_abs_difference")
    size = "" if difference is None else f" (max |Δ| {difference:.2g})"
    return f"no speed is shown, because the equivalence check failed{size}"


def scalings_by_key(entries: Sequence[RunEntry]) -> pd.DataFrame:
    """Return the table of `scalings` (speed-ups over one worker), labelled by run keys."""
    return scalings({entry.key: entry.run for entry in entries})


def throughput_panel(entries: Sequence[RunEntry]) -> Panel:
    """Return a panel: a throughput bar per run, with a whisker from the slow to the fast steps."""
    import pandas as pd

    rows = [
        {"run": entry.key, "place": place} | _speeds(entry)
        for place, entry in enumerate(entries)
        if entry.metrics.get("samples_per_second") is not None and not entry.equivalence_failed
    ]
    looks = {entry.key: entry for entry in entries}
    return Panel(
        title="Throughput\nwhisker: from the p10 to the p90 of the step time",
        x="",
        y="samples/s",
        traces=bars(pd.DataFrame(rows), "place", "speed", looks) if rows else [],
        note=refusals(entries) or "no speed was measured",
        always_note=bool(refusals(entries)),
        # The legend names the runs, because labels are wider than a bar.
        x_axis={"showticklabels": False, "range": [-0.6, len(entries) - 0.4], "showgrid": False},
        y_axis={"rangemode": "tozero"},
    )


def scaling_panels(entries: Sequence[RunEntry]) -> list[Panel]:
    """Return the panels of speed-up and efficiency; filled markers show runs with strong scaling.

    Lines connect the medians over seeds, and bands show the range over seeds. A dashed line shows
    the ideal scaling.
    """
    table = scalings_by_key(entries)
    ticks = sorted(set(table["workers"]))
    missing = "" if len(table) else NO_BASELINE
    note = "\n".join(part for part in (refusals(entries), missing) if part)
    return [
        Panel(
            title=f"{title}\n{_kinds(table)}",
            x="workers",
            y=unit,
            traces=_scaling_traces(table, entries, y) if len(table) else [],
            note=note,
            # Only the speed-up panel shows the note. The note of the efficiency panel would be the
            # same.
            always_note=bool(note) and y == "speedup",
            x_axis={"tickvals": ticks} if ticks else {},
            y_axis={"rangemode": "tozero"},
        )
        for title, y, unit in (
            ("Speed-up over 1 worker", "speedup", "speed-up"),
            ("Efficiency", "efficiency", "efficiency, %"),
        )
    ]


def throughput_in_words(entries: Sequence[RunEntry]) -> str:
    """List the samples per second of every run, or the reason why a run has no speed."""
    parts = []
    for entry in entries:
        speed = entry.metrics.get("samples_per_second")
        if entry.equivalence_failed:
            parts.append(f"{entry.label}: {refusal(entry)}")
        elif speed is not None:
            parts.append(f"{entry.label}: {speed:,.0f} samples/s")
    return "; ".join(parts)


def speedup_in_words(entries: Sequence[RunEntry]) -> str:
    """List the speed-up and efficiency of every run; return "" without a run on one worker."""
    labels = {entry.key: entry.label for entry in entries}
    return "; ".join(
        f"{labels[point.run]}: speed-up {point.speedup:.2f} on {point.workers} workers "
        f"({point.kind}, efficiency {point.efficiency:.0f} %)"
        for point in scalings_by_key(entries).itertuples()
        if point.workers > 1
    )


def _speeds(entry: RunEntry) -> dict[str, float | str]:
    speed, step = entry.metrics["samples_per_second"], entry.metrics.get("step_ms") or {}
    middle = step.get("median") or 0.0
    # The 90th percentile of the step time gives the lowest speed. A long step processes fewer
    # samples per second.
    slow, fast = (speed * middle / step[edge] if step.get(edge) else speed for edge in _EDGES)
    return {
        "speed": speed,
        "speed_low": min(slow, speed),
        "speed_high": max(fast, speed),
        "hover": f"{speed:,.0f} samples/s",
    }


_EDGES = ("p90", "p10")


def _scaling_traces(table: pd.DataFrame, shown: Sequence[RunEntry], y: str) -> list[Trace]:
    looks = {entry.key: entry for entry in shown}
    unit = " %" if y == "efficiency" else ""
    hover = [
        f"{getattr(row, y):.3g}{unit} ({getattr(row, f'{y}_low'):.3g} to "
        f"{getattr(row, f'{y}_high'):.3g}) {row.kind}, "
        f"against {safe_text(looks[row.baseline].label)}"
        for row in table.itertuples()
    ]
    points = table.assign(open=table["kind"] == "weak", hover=hover)
    most = max(table["workers"])
    ideal = rule([1, most], [100, 100] if unit else [1, most], "dash") | {"name": "ideal"}
    bands = seed_bands(table)
    lines = {
        line: LineStyle(
            label=f"{group['kind'].iloc[0]} scaling",
            color=looks[group["runs"].iloc[0][0]].color,
            dash="solid" if group["kind"].iloc[0] == "strong" else "dot",
            symbol="circle",
            runs=group["runs"].iloc[0],
        )
        for line, group in bands.groupby("line", sort=False)
    }
    through = line_with_band(bands, "workers", y, lines, by="line", hoverinfo="skip")
    return [*through, ideal, *points_with_bars(points, "workers", y, looks)]


def _kinds(table: pd.DataFrame) -> str:
    """Explain the markers: `● strong scaling: same global batch`."""
    kinds = set(table[table["workers"] > 1]["kind"])
    if len(kinds) == 2:
        return "● strong, ○ weak scaling"
    return "".join(_KINDS[kind] for kind in kinds)
