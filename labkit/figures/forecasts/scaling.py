"""Forecasts of parallel efficiency by number of workers, compared with measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import number_text, plural, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Finding, Markdown, lines, sentences
from labkit.figures.kit.marks import line_with_band, points_with_bars, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.forecast import Forecast
from labkit.records.run import Run

# `Foreseen` maps each name to forecasts for several numbers of workers.
Foreseen = Mapping[str, Sequence[Forecast]]
# `Measured` maps the names of the forecasts to measured runs, each with its own forecast. For each
# name, at least one measured run has a single worker.
Measured = Mapping[str, Sequence[tuple[Run, Forecast]]]
HALF_EFFICIENCY = 0.5  # efficiency below which more than half of the workers' time is lost


def scaling_table(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> pd.DataFrame:
    """Return a row per forecast or run: name, kind, workers, efficiency, samples/s, step (s).

    The efficiency of a run is the ratio of two speeds in samples/s. The speed per worker is divided
    by the speed of a run with one worker.

    Raises:
        InvalidInput: The measured runs of a name include no run with one worker.
    """
    rows = [
        {"name": name, "kind": "forecast", "workers": forecast.workers}
        | _with_band(
            "efficiency", forecast.weak_efficiency if weak else forecast.strong_efficiency, forecast
        )
        | {"samples_per_s": forecast.samples_per_s, "step_s": forecast.seconds}
        for name, forecasts in foreseen.items()
        for forecast in forecasts
    ]
    for name, runs in (measured or {}).items():
        single_worker_runs = [run for run, _ in runs if run.metrics["workers"] == 1]
        if not single_worker_runs:
            raise InvalidInput(
                f"{name}: no run has one worker, but the efficiency needs such a run as its "
                "reference: add a run with workers=1"
            )
        base = float(np.median([run.metrics["samples_per_second"] for run in single_worker_runs]))
        rows += [_measured(name, run, own_forecast, base) for run, own_forecast in runs]
    return pd.DataFrame(rows)


def _measured(name: str, run: Run, own_forecast: Forecast, base: float) -> dict[str, object]:
    """Return the row of a run; `error` is measured rate / forecast rate - 1."""
    count, rate, step = (run.metrics[k] for k in ("workers", "samples_per_second", "step_ms"))
    return {
        "name": name,
        "kind": "measured",
        "workers": count,
        "efficiency": rate / base / count,
        "efficiency_low": rate / base / count * step["median"] / step["p90"],
        "efficiency_high": rate / base / count * step["median"] / step["p10"],
        "samples_per_s": rate,
        "step_s": own_forecast.rows / rate,
        "error": rate / own_forecast.samples_per_s - 1,
        "open": bool(run.metrics["oversubscribed"]),
    }


def forecast_scaling(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> Figure:
    """Draw efficiency over the number of workers: forecasts as lines, measured runs as markers.

    An open marker is a run that used more threads than its host has cores.

    Args:
        foreseen: For each name, forecasts for several numbers of workers.
        measured: Measured runs, with the names of the forecasts as keys. For each name, one run has
            a single worker. Each run is paired with a forecast in which all ranks share this
            machine.
        weak: Whether the batch size per rank is constant (weak scaling). If `weak` is false, the
            ranks divide one batch of constant size (strong scaling).
    """
    table = scaling_table(foreseen, measured, weak)
    looks = lines(table["name"])
    table["hover"] = [
        f"{row.name}, {row.workers:,} workers: {row.efficiency:.1%}, {row.kind}; step "
        f"{seconds_text(row.step_s)}, {number_text(row.samples_per_s)} samples/s"
        for row in table.set_index("name", drop=False).itertuples(index=False)
    ]
    forecast_rows, measured_rows = (
        table[table["kind"] == "forecast"],
        table[table["kind"] == "measured"],
    )
    edges = [float(table["workers"].min()), float(table["workers"].max())]
    traces: list[Trace] = [
        *line_with_band(forecast_rows, "workers", "efficiency", looks, by="name"),
        *(
            points_with_bars(measured_rows, "workers", "efficiency", looks, by="name")
            if len(measured_rows)
            else []
        ),
        rule(edges, [HALF_EFFICIENCY, HALF_EFFICIENCY], "dash"),
    ]
    kind = "weak scaling: same local batch" if weak else "strong scaling: same global batch"
    panel = Panel(
        title=f"Efficiency, {kind}\nlines: forecasts; markers: measured runs (open if ranks "
        "shared cores)",
        x="workers",
        y="efficiency",
        traces=traces,
        x_axis={"type": "log"},
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    first = next(forecast for forecasts in foreseen.values() for forecast in forecasts)
    title = f"Scaling · forecast · {first.where}"
    remark = f"calibration {first.calibration}"
    words = [str(finding.sentence) for finding in _scaling_findings(table)]
    return sheet([[panel]], looks.values(), title, [remark], words, plot=320)


def summarize_scaling(
    foreseen: Foreseen, measured: Measured | None = None, weak: bool = True
) -> Markdown:
    """Summarize efficiency with the most workers, its fall below 50 %, and forecast errors."""
    return sentences(_scaling_findings(scaling_table(foreseen, measured, weak)))


def _scaling_findings(table: pd.DataFrame) -> list[Finding]:
    findings = []
    for name, rows in table.groupby("name", sort=False):
        forecast_rows = rows[rows["kind"] == "forecast"].sort_values("workers")
        above = forecast_rows[
            (forecast_rows["efficiency"] >= HALF_EFFICIENCY).cummin()
        ]  # The selection ends before the first efficiency below one half.
        last = forecast_rows.iloc[-1]
        most = "none" if above.empty else plural(int(above["workers"].max()), "worker")
        details = [f"efficiency at {last['workers']:,} workers {last['efficiency']:.0%}"]
        runs = rows[(rows["kind"] == "measured") & (rows["workers"] > 1)]
        if len(runs):
            error = f"median error of the forecasts {runs['error'].abs().median():.0%}"
            details.append(f"{plural(len(runs), 'run')} with several ranks, {error}")
        head = f"**{name}** keeps an efficiency of at least one half up to"
        findings.append(Finding(head, details=(most, *details)))
    return findings


def _with_band(name: str, value: float, forecast: Forecast) -> dict[str, float]:
    low, high = forecast.interval
    band = {
        f"{name}_low": value * forecast.seconds / high,
        f"{name}_high": value * forecast.seconds / low,
    }
    return {name: value} | band


WORST = 5  # number of settings in the list of the largest errors
# Each row is one setting from `tests.acceptance.forecasts.comparison.compared`. The fields of a row
# are case, network, predicted_ms, low_ms, high_ms, measured_ms, least_ms, most_ms, error and group.
Compared = Sequence[Mapping[str, Any]]


def forecast_diagonal(rows: Compared, calibration: str = "") -> Figure:
    """Draw predicted against measured step times: one marker per setting, with ranges as whiskers.

    Args:
        rows: Predicted and measured step times of each setting; see `Compared`.
        calibration: Name of the calibration that the forecasts use, for the title.
    """
    table = _error_table(rows)
    looks = lines(table["group"])
    ends = [float(table[["least", "low"]].min().min()), float(table[["most", "high"]].max().max())]
    panel = Panel(
        title="Time of a step (global batch)\ndashed: predicted = measured",
        x="measured",
        y="predicted",
        traces=[
            rule(ends, ends, "dash"),
            *points_with_bars(table, "measured", "predicted", looks, by="group", size=7),
        ],
        x_axis=seconds_axis(*ends),
        y_axis=seconds_axis(*ends),
    )
    title = "Forecasts and measured runs · wall clock · emulated networks"
    words = [finding.sentence for finding in _error_findings(table)]
    remarks = [f"calibration {calibration}" * bool(calibration)]
    return sheet([[panel]], looks.values(), title, remarks, words, plot=420)


def summarize_diagonal(rows: Compared) -> Markdown:
    """Summarize the errors of forecasts by group of settings, and list the five largest."""
    return sentences(_error_findings(_error_table(rows)))


def _error_table(rows: Compared) -> pd.DataFrame:
    """Return a table of step times in seconds, with ranges for runs and intervals for forecasts."""
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
    for group, rows in table.groupby("group", sort=False):
        error = rows["error"].abs()
        ninth = f"90 % of the errors are at most {error.quantile(0.9):.1%}"
        findings.append(
            Finding(
                f"**{group}**, median forecast error of {len(rows)} settings",
                value=float(error.median()),
                text="{:.1%}".format,
                details=(ninth,),
            )
        )
    calm = table[table["group"] == "calm"]
    for row in calm.loc[calm["error"].abs().sort_values().index[::-1]][:WORST].to_dict("records"):
        findings.append(Finding("Largest error", details=(str(row["hover"]),)))
    return findings
