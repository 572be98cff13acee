"""Speeds: samples a second, speed-up and efficiency against one worker; none for a failed gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from labkit.figures.kit.entries import Entry, Line, safe_text
from labkit.figures.kit.marks import bars, line_with_band, points_with_bars, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.records.analysis.scaling import scalings, seed_bands

if TYPE_CHECKING:
    import pandas as pd

NO_BASELINE = "no run with workers=1 and otherwise equal parameters to compare with"
_NAMED = 2  # so many failed gates are named in a panel; the table has all
_KINDS = {
    "strong": "● strong scaling: same global batch",
    "weak": "○ weak scaling: same local batch",
}


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


def scaled(shown: Sequence[Entry]) -> pd.DataFrame:
    """The runs against one worker, see `scalings`, by the keys of the entries."""
    return scalings({entry.key: entry.run for entry in shown})


def throughput_panel(shown: Sequence[Entry]) -> Panel:
    """A bar a run; the whisker reaches from the speed of a slow step (p90) to a fast one (p10)."""
    import pandas as pd

    rows = [
        {"run": entry.key, "place": place} | _speeds(entry)
        for place, entry in enumerate(shown)
        if entry.metrics.get("samples_per_second") is not None and not entry.gate_failed
    ]
    looks = {entry.key: entry for entry in shown}
    return Panel(
        title="Throughput\nwhisker: p10 to p90 of step time",
        x="",
        y="samples/s",
        traces=bars(pd.DataFrame(rows), "place", "speed", looks) if rows else [],
        note=refusals(shown) or "no speed was measured",
        always_note=bool(refusals(shown)),
        # Who is who says the legend: labels of runs are longer than a bar is wide.
        x_axis={"showticklabels": False, "range": [-0.6, len(shown) - 0.4], "showgrid": False},
        y_axis={"rangemode": "tozero"},
    )


def scaling_panels(shown: Sequence[Entry]) -> list[Panel]:
    """Speed-up and efficiency: a marker a run, filled for strong scaling, open for weak.

    Lines go through the medians of seeds, in a band of their spread; the ideal is dashed.
    """
    table = scaled(shown)
    ticks = sorted(set(table["workers"]))
    missing = "" if len(table) else NO_BASELINE
    note = "\n".join(part for part in (refusals(shown), missing) if part)
    return [
        Panel(
            title=f"{title}\n{_kinds(table)}",
            x="workers",
            y=unit,
            traces=_scaling_traces(table, shown, y) if len(table) else [],
            note=note,
            # Once: the panels stand beside each other.
            always_note=bool(note) and y == "speedup",
            x_axis={"tickvals": ticks} if ticks else {},
            y_axis={"rangemode": "tozero"},
        )
        for title, y, unit in (
            ("Speed-up over 1 worker", "speedup", "speed-up"),
            ("Efficiency", "efficiency", "efficiency, %"),
        )
    ]


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


def speedup_in_words(shown: Sequence[Entry]) -> str:
    """Every run's speed-up and efficiency; empty where there is no baseline."""
    labels = {entry.key: entry.label for entry in shown}
    return "; ".join(
        f"{labels[point.run]}: speed-up {point.speedup:.2f} on {point.workers} workers "
        f"({point.kind}, efficiency {point.efficiency:.0f} %)"
        for point in scaled(shown).itertuples()
        if point.workers > 1
    )


def _speeds(entry: Entry) -> dict[str, float | str]:
    speed, step = entry.metrics["samples_per_second"], entry.metrics.get("step_ms") or {}
    middle = step.get("median") or 0.0
    # A step that takes longer is fewer samples a second.
    slow, fast = (speed * middle / step[edge] if step.get(edge) else speed for edge in _EDGES)
    return {
        "speed": speed,
        "speed_low": min(slow, speed),
        "speed_high": max(fast, speed),
        "hover": f"{speed:,.0f} samples/s",
    }


_EDGES = ("p90", "p10")


def _scaling_traces(table: pd.DataFrame, shown: Sequence[Entry], y: str) -> list[Trace]:
    looks = {entry.key: entry for entry in shown}
    unit = " %" if y == "efficiency" else ""
    said = [
        f"{getattr(row, y):.3g}{unit} ({getattr(row, f'{y}_low'):.3g} to "
        f"{getattr(row, f'{y}_high'):.3g}) {row.kind}, "
        f"against {safe_text(looks[row.baseline].label)}"
        for row in table.itertuples()
    ]
    points = table.assign(open=table["kind"] == "weak", hover=said)
    most = max(table["workers"])
    ideal = rule([1, most], [100, 100] if unit else [1, most], "dash") | {"name": "ideal"}
    found = seed_bands(table)
    lines = {
        line: Line(
            label=f"{own['kind'].iloc[0]} scaling",
            # A line through several runs has the colour of its first.
            color=looks[own["runs"].iloc[0][0]].color,
            dash="solid" if own["kind"].iloc[0] == "strong" else "dot",
            symbol="circle",
            runs=own["runs"].iloc[0],
        )
        for line, own in found.groupby("line", sort=False)
    }
    through = line_with_band(found, "workers", y, lines, by="line", hoverinfo="skip")
    return [*through, ideal, *points_with_bars(points, "workers", y, looks)]


def _kinds(table: pd.DataFrame) -> str:
    """What the markers are: `● strong scaling: same global batch`."""
    found = set(table[table["workers"] > 1]["kind"])
    if len(found) == 2:
        return "● strong, ○ weak scaling"
    return "".join(_KINDS[kind] for kind in found)
