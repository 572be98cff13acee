"""Predicted against measured: a marker a setting, and the diagonal on which both are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.common.units import seconds_axis, seconds_text
from labkit.figures.kit.entries import lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import points_with_bars, rule
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

WORST = 5
# A row a setting, as `tests.acceptance.forecasts.comparison.compared` makes them: case, network,
# predicted_ms, low_ms, high_ms, measured_ms, least_ms, most_ms, error, group.
Compared = Sequence[Mapping[str, Any]]


def forecast_diagonal(rows: Compared, calibration: str = "") -> Figure:
    """A marker a setting: measured to the right, predicted upwards, whiskers over both spreads.

    Args:
        rows: predicted and measured.
        calibration: from which forecasts were made, by its name.
    """
    table = _table(rows)
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
    words = [each.sentence for each in _findings(table)]
    remarks = [f"calibration {calibration}" * bool(calibration)]
    return sheet([[panel]], looks.values(), title, remarks, words, plot=420)


def diagonal_reading(rows: Compared) -> Markdown:
    """How far forecasts are off, group by group, and the five that are furthest off."""
    return sentences(_findings(_table(rows)))


def _table(rows: Compared) -> pd.DataFrame:
    """Times in s; the whiskers of what is measured are its runs, of what is predicted its band."""
    import pandas as pd

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


def _findings(table: pd.DataFrame) -> list[Finding]:
    found = []
    for group, own in table.groupby("group", sort=False):
        error = own["error"].abs()
        ninth = f"nine in ten within {error.quantile(0.9):.1%}"
        found.append(
            Finding(
                f"**{group}**, off by in the median of {len(own)} settings",
                value=float(error.median()),
                text="{:.1%}".format,
                said=(ninth,),
            )
        )
    calm = table[table["group"] == "calm"]
    for row in calm.loc[calm["error"].abs().sort_values().index[::-1]][:WORST].to_dict("records"):
        found.append(Finding("Furthest off", said=(str(row["hover"]),)))
    return found
