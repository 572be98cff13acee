"""Forecasts of efficiency over workers, and forecasts against measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import number_text, plural, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band, points_with_bars, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.forecast import Forecast
from labkit.records.run import Run

Foreseen = Mapping[str, Sequence[Forecast]]  # by name, over the number of workers
# By the same names, runs with what was forecast for each as it ran; one has a single worker.
Measured = Mapping[str, Sequence[tuple[Run, Forecast]]]
FALLEN = 0.5  # efficiency below which ranks do more waiting than work


def scaling_table(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> pd.DataFrame:
    """Return a row a forecast or run: name, kind, workers, efficiency, samples/s, and step in s.

    Efficiency of runs is their rate over that of the run with one worker, by worker.

    Raises: InvalidInput, where runs are given without one of one worker.
    """
    rows = [
        {"name": name, "kind": "forecast", "workers": each.workers}
        | _with_band("efficiency", each.weak if weak else each.strong, each)
        | {"samples_per_s": each.samples_per_s, "step_s": each.seconds}
        for name, own in foreseen.items()
        for each in own
    ]
    for name, runs in (measured or {}).items():
        alone = [run for run, _ in runs if run.metrics["workers"] == 1]
        if not alone:
            raise InvalidInput(f"{name}: no run has one worker, against whom the others are held")
        base = float(np.median([run.metrics["samples_per_second"] for run in alone]))
        rows += [_measured(name, run, here, base) for run, here in runs]
    return pd.DataFrame(rows)


def _measured(name: str, run: Run, here: Forecast, base: float) -> dict[str, object]:
    """Return the row of a run; `error` compares its rate with its own forecast."""
    count, rate, step = (run.metrics[k] for k in ("workers", "samples_per_second", "step_ms"))
    return {
        "name": name,
        "kind": "measured",
        "workers": count,
        "efficiency": rate / base / count,
        "efficiency_low": rate / base / count * step["median"] / step["p90"],
        "efficiency_high": rate / base / count * step["median"] / step["p10"],
        "samples_per_s": rate,
        "step_s": here.rows / rate,
        "error": rate / here.samples_per_s - 1,
        "open": bool(run.metrics["oversubscribed"]),
    }


def forecast_scaling(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> Figure:
    """Draw efficiency over workers: forecasts as lines with intervals, runs as markers.

    Open markers: ranks had to share cores.

    Args:
        foreseen: forecasts by name.
        measured: runs by the same names, each with its own forecast, on ranks that share this
            machine; one of them is of one worker.
        weak: each rank keeps its part of the batch; else they divide one batch.
    """
    table = scaling_table(foreseen, measured, weak)
    looks = lines(table["name"])
    table["hover"] = [
        f"{row.name}, {row.workers:,} workers: {row.efficiency:.1%}, {row.kind}; step "
        f"{seconds_text(row.step_s)}, {number_text(row.samples_per_s)} samples/s"
        for row in table.set_index("name", drop=False).itertuples(index=False)
    ]
    ahead, seen = table[table["kind"] == "forecast"], table[table["kind"] == "measured"]
    edges = [float(table["workers"].min()), float(table["workers"].max())]
    traces: list[Trace] = [
        *line_with_band(ahead, "workers", "efficiency", looks, by="name"),
        *(points_with_bars(seen, "workers", "efficiency", looks, by="name") if len(seen) else []),
        rule(edges, [FALLEN, FALLEN], "dash"),
    ]
    kind = "weak: each rank keeps its rows" if weak else "strong: ranks divide one batch"
    panel = Panel(
        title=f"Efficiency, {kind}\nlines: forecast, with its interval; markers: measured",
        x="workers",
        y="efficiency",
        traces=traces,
        x_axis={"type": "log"},
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    first = next(each for own in foreseen.values() for each in own)
    title = f"Scaling · forecast · {first.where}"
    remark = f"calibration {first.calibration}"
    words = [str(finding.sentence) for finding in _scaling_findings(table)]
    return sheet([[panel]], looks.values(), title, [remark], words, plot=320)


def scaling_reading(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> Markdown:
    """Say where each efficiency falls below a half, its end, and the errors of forecasts."""
    return sentences(_scaling_findings(scaling_table(foreseen, measured, weak)))


def _scaling_findings(table: pd.DataFrame) -> list[Finding]:
    findings = []
    for name, own in table.groupby("name", sort=False):
        ahead = own[own["kind"] == "forecast"].sort_values("workers")
        above = ahead[(ahead["efficiency"] >= FALLEN).cummin()]  # it may rise again
        last = ahead.iloc[-1]
        most = "none" if above.empty else plural(int(above["workers"].max()), "worker")
        details = [f"at {last['workers']:,} workers {last['efficiency']:.0%}"]
        seen = own[(own["kind"] == "measured") & (own["workers"] > 1)]
        if len(seen):
            off = f"forecasts of these off by {seen['error'].abs().median():.0%} (median)"
            details.append(f"{plural(len(seen), 'run')} of several ranks here, {off}")
        head = f"**{name}** keeps half of its efficiency up to"
        findings.append(Finding(head, details=(most, *details)))
    return findings


def _with_band(name: str, value: float, each: Forecast) -> dict[str, float]:
    low, high = each.interval
    band = {f"{name}_low": value * each.seconds / high, f"{name}_high": value * each.seconds / low}
    return {name: value} | band


WORST = 5
# A row a setting, as `tests.acceptance.forecasts.comparison.compared` makes them: case, network,
# predicted_ms, low_ms, high_ms, measured_ms, least_ms, most_ms, error, group.
Compared = Sequence[Mapping[str, Any]]


def forecast_diagonal(rows: Compared, calibration: str = "") -> Figure:
    """Draw predicted over measured times, a marker a setting, with whiskers for both ranges.

    Args:
        rows: predicted and measured.
        calibration: from which forecasts were made, by its name.
    """
    table = _error_table(rows)
    looks = lines(table["group"])
    ends = [float(table[["least", "low"]].min().min()), float(table[["most", "high"]].max().max())]
    panel = Panel(
        title="Time of a global batch\ndashed: predicted as measured",
        x="measured",
        y="predicted",
        traces=[
            rule(ends, ends, "dash"),
            *points_with_bars(table, "measured", "predicted", looks, by="group", size=7),
        ],
        x_axis=seconds_axis(*ends),
        y_axis=seconds_axis(*ends),
    )
    title = "Forecasts against runs · wall clock · emulated networks"
    words = [each.sentence for each in _error_findings(table)]
    remarks = [f"calibration {calibration}" * bool(calibration)]
    return sheet([[panel]], looks.values(), title, remarks, words, plot=420)


def diagonal_reading(rows: Compared) -> Markdown:
    """Say the errors of forecasts by group, and list the five largest."""
    return sentences(_error_findings(_error_table(rows)))


def _error_table(rows: Compared) -> pd.DataFrame:
    """Return times in s, with the range of runs and the interval of forecasts."""
    table = pd.DataFrame(rows)
    columns = {"predicted": ("predicted", "low", "high"), "measured": ("measured", "least", "most")}
    for name, (middle, low, high) in columns.items():
        for end, column in (("", middle), ("_low", low), ("_high", high)):
            table[name + end] = table[f"{column}_ms"] / 1e3
            table[column] = table[f"{column}_ms"] / 1e3
    table["hover"] = [
        f"{row['case']} on {row['network'] or 'no network'}: predicted "
        f"{seconds_text(row['predicted'])}, measured {seconds_text(row['measured'])}, "
        f"{row['error']:+.0%}"
        for row in table.to_dict("records")
    ]
    return table


def _error_findings(table: pd.DataFrame) -> list[Finding]:
    findings = []
    for group, own in table.groupby("group", sort=False):
        error = own["error"].abs()
        ninth = f"nine in ten within {error.quantile(0.9):.1%}"
        findings.append(
            Finding(
                f"**{group}**, off by in the median of {len(own)} settings",
                value=float(error.median()),
                text="{:.1%}".format,
                details=(ninth,),
            )
        )
    calm = table[table["group"] == "calm"]
    for row in calm.loc[calm["error"].abs().sort_values().index[::-1]][:WORST].to_dict("records"):
        findings.append(Finding("Furthest off", details=(str(row["hover"]),)))
    return findings
