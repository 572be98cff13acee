"""Predicted and measured times of collectives: table, figure, and summary of errors."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Finding, LineStyle, Markdown, lines, sentences
from labkit.figures.kit.marks import curve, points, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import Fit, simulate
from labkit.simulate.simulation import Rows, measurements, model_of, prediction_table

__all__ = ["measurements", "predicted_and_measured", "summarize_prediction"]

# A curve contains buffer sizes in bytes, and times in seconds.
Curve: TypeAlias = tuple[list[float], list[float]]
POINTS = 33


def predicted_and_measured(
    rows: Rows, network: str | Network | Fit | None = None, gamma: float = 0.0
) -> tuple[pd.DataFrame, Figure]:
    """Simulate measured collectives; return a table with errors, and a figure.

    The error of a prediction is predicted time / measured time - 1. Algorithms without a schedule
    ("mpi") are measured, but not predicted. The table has no time for a measurement whose allreduce
    returned wrong sums.

    Args:
        rows: Measurements, the result of `labkit.bench.collectives.measure`.
        network: Network of the prediction: a name, a `Network`, or a `Fit`. A `Fit` is a fitted
            cost model with its own γ (seconds per byte). By default, the measurements name the
            network.
        gamma: Seconds that a rank needs to add one received byte (γ); ignored if `network` is a
            `Fit`.

    Raises:
        InvalidInput: There are no measurements, or neither the measurements nor `network` name a
            network.
    """
    world, gamma, source = model_of(rows, network, gamma)
    table = prediction_table(rows, world, gamma)
    curves = {
        (name, count): _curve(name, count, table["bytes"], world, gamma)
        for name, count in dict.fromkeys(zip(table["algorithm"], table["workers"], strict=True))
        if name in ALLREDUCE
    }
    return table, _figure(table, curves, rows, source)


def _curve(
    name: str, count: int, nbytes: pd.Series[float], network: Network, gamma: float
) -> Curve:
    """Return many buffer sizes and their predicted times, which form a smooth curve."""
    grid = np.geomspace(nbytes.min(), nbytes.max(), POINTS) if len(set(nbytes)) > 1 else nbytes
    sizes = [float(value) for value in grid]
    return sizes, [simulate(name, count, n, network, gamma=gamma).seconds for n in sizes]


def _figure(
    table: pd.DataFrame, curves: dict[tuple[str, int], Curve], rows: Rows, source: str
) -> Figure:
    looks = lines(table["algorithm"])
    groups = [(looks[name], group) for name, group in table.groupby("algorithm", sort=False)]
    shown = table[["measured_ms", "min_ms", "p90_ms", "predicted_ms"]].to_numpy() / 1e3
    if table["measured_ms"].isna().all():
        raise InvalidInput(
            "all rows have wrong sums, so their times are not drawn; give rows with correct sums"
        )
    # The factors 1/1.5 and 1.5 give the axis a nonzero width even for a single size.
    sizes_shown = [table["bytes"].min() / 1.5, table["bytes"].max() * 1.5]
    sizes = bytes_axis(*sizes_shown)
    panels = [
        Panel(
            "Time\nmarkers: measured (median); whiskers: minimum to p90; lines: predicted",
            "buffer size",
            "time of the allreduce",
            [curve(*line, looks[name], 1.5) for (name, _), line in curves.items()]
            + [_measured(line, group) for line, group in groups],
            x_axis=sizes,
            y_axis=seconds_axis(float(np.nanmin(shown)), float(np.nanmax(shown))),
            link="bytes",
        ),
        Panel(
            "Error of the prediction\npredicted / measured − 1; whiskers: minimum to p90",
            "buffer size",
            "error, %",
            [rule(sizes_shown, [0, 0], "dash"), *(_errors(line, group) for line, group in groups)],
            x_axis=sizes,
            link="bytes",
        ),
    ]
    network = ", ".join(sorted({str(row["network"] or "not emulated") for row in rows}))
    ranks = ", ".join(str(count) for count in sorted(table["workers"].unique()))
    title = f"Predicted and measured, {ranks} ranks · wall clock · network {network}"
    remark = f"prediction: {source}"
    # The time of an allreduce with wrong sums is meaningless, so such measurements are only
    # counted.
    wrong = int((~table["correct"]).sum())
    if wrong:
        remark += f"; {wrong} rows with wrong sums are omitted"
    bullets = summarize_prediction(table).replace("- ", "").replace("**", "").split("\n")
    words = [bullet.strip(". ") for bullet in bullets]
    return sheet([panels], looks.values(), title, [remark], words, plot=250)


def _measured(look: LineStyle, group: pd.DataFrame) -> Trace:
    """Return markers of median times in seconds, with whiskers from the minimum to the p90."""
    times = group[["measured_ms", "min_ms", "p90_ms"]] / 1e3
    times.columns = ["time", "time_low", "time_high"]
    details = [
        f"{bytes_text(row.bytes)}: measured {seconds_text(row.measured_ms / 1e3)}, "
        f"predicted {seconds_text(row.predicted_ms / 1e3)}"
        for row in group.itertuples()
    ]
    return points(times.assign(bytes=group["bytes"], hover=details), "bytes", "time", look)


def _errors(look: LineStyle, group: pd.DataFrame) -> Trace:
    """Return markers of prediction errors in %, with whiskers for the minimum and the p90 time."""
    errors = group[["bytes"]].assign(
        error=100 * group["error"],
        error_low=100 * (group["predicted_ms"] / group["p90_ms"] - 1),
        error_high=100 * (group["predicted_ms"] / group["min_ms"] - 1),
    )
    line = {"color": look.color, "dash": look.dash, "width": 1}
    through = {"mode": "markers+lines", "line": line, "hovertemplate": "%{y:+.2f} %"}
    return points(errors, "bytes", "error", look) | through


def summarize_prediction(table: pd.DataFrame) -> Markdown:
    """Summarize each algorithm's prediction error; compare the slowest algorithm to the others."""
    groups = table.groupby("algorithm", sort=False)
    findings = [Finding(f"**{name}**", details=(_error_text(group),)) for name, group in groups]
    return sentences([*findings, *map(Finding, _slowest_texts(table))])


def _error_text(group: pd.DataFrame) -> str:
    wrong = int((~group["correct"]).sum())
    if wrong:
        return f"no times, because {wrong} of {len(group)} rows have wrong sums"
    known = group.dropna(subset="error")
    if known.empty:
        return "not predicted, because labkit has no schedule of this algorithm"
    worst = known.loc[known["error"].abs().idxmax()]
    inside = (
        (known["min_ms"] <= known["predicted_ms"]) & (known["predicted_ms"] <= known["p90_ms"])
    ).sum()
    return (
        f"median error {known['error'].abs().median():.1%} (over "
        f"{len(known)} sizes), largest error {worst['error']:+.1%} at "
        f"{bytes_text(worst['bytes'])}; "
        f"{inside} of {len(known)} predictions are within the spread of the measurements"
    )


def _slowest_texts(table: pd.DataFrame) -> list[str]:
    """Compare the slowest algorithm with all other algorithms at the largest buffer size."""
    largest = table[table["bytes"] == table["bytes"].max()].set_index("algorithm")
    # An algorithm that returned wrong sums has no measured time, so `dropna` removes its row.
    timed = largest.dropna(subset="measured_ms").sort_values("measured_ms")
    lines = []
    for name, row in timed[:-1].iterrows():
        slowest, size = timed.iloc[-1], bytes_text(table["bytes"].max())
        ratio = slowest["measured_ms"] / row["measured_ms"]
        model = slowest["predicted_ms"] / row["predicted_ms"]
        beside = f", predicted {model:.2f}" if model == model else ""
        lines.append(
            f"At {size}, {slowest.name} takes {ratio:.2f} times as long as {name} "
            f"(measured{beside})"
        )
    return lines
