"""Compression statistics by layer: errors, residuals and bits of compressed gradients."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.common.errors import LabkitError
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    LineStyle,
    Markdown,
    clock_and_network,
    compressor_text,
    entries,
    lines,
    sentences,
)
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.figures.runs.learning import POINTS
from labkit.records.compressors import method
from labkit.records.run import Run
from labkit.records.verdict import completed_seeds

MEASURES = {
    "relative_error": ("Relative error", "error / norm of the gradient"),
    "cosine": ("Cosine", "to the true mean gradient"),
    "residual_norm": ("Residual", "norm of the error-feedback residual"),
    "bits_per_parameter": ("Bits per parameter", "bits"),
    "fraction_sent": ("Fraction sent", "share of elements"),
}
_LINES = 60  # The figure shows at most `_LINES` layers, because more lines cannot be told apart.
_NAMED = 6  # A sentence names at most `_NAMED` layers.
_BANDS = 6  # Bands are drawn for at most `_BANDS` layers, because more bands would overlap.


def compression_stats(run: Run) -> Figure:
    """Draw error, cosine, residual, bits and sent fraction of gradients by step and layer.

    Each layer has a line (mean over ranks and seeds) and a band (range over ranks and seeds).

    Raises:
        LabkitError: The run has no compression statistics.
    """
    observed = observations(run)
    layers = observed["layer"].unique()
    shown = layers[:: -(-len(layers) // _LINES)]
    looks = lines(map(str, shown))
    drawn = observed[observed["layer"].isin(shown)]
    panels = [_panel(drawn, measure, looks) for measure in MEASURES]
    where = clock_and_network(entries([run]))
    compressor = compressor_text(method(run), with_feedback=True)
    title = f"Compression statistics · {compressor} · {where}"
    remarks = ["lines: means over ranks and seeds; values that are not finite are omitted"]
    if len(shown) < len(layers):
        remarks.append(f"{len(shown)} of {len(layers):,} layers are shown, evenly selected")
    words = (
        str(summarize_compression_stats(run)).replace("**", "").replace("\n- ", " ").lstrip("- ")
    )
    return sheet([panels[:2], panels[2:]], looks.values(), title, remarks, [words.rstrip(".")])


def observations(run: Run) -> pd.DataFrame:
    """Return the compression statistics of all seeds of a run, with a column `seed`.

    Raises:
        LabkitError: The run has no compression statistics.
    """
    parts = {
        seed_run.experiment["seed"]: seed_run.compression_stats for seed_run in completed_seeds(run)
    }
    tables = [part.assign(seed=seed) for seed, part in parts.items() if len(part)]
    if not tables:
        raise LabkitError(
            f"{run.name} has no compression statistics (state: {run.status['state']}); give a "
            "completed run with lk.AllReduce(compressor=…, compression_stats_every=10)"
        )
    return pd.concat(tables, ignore_index=True)


def summarize_compression_stats(run: Run) -> Markdown:
    """Summarize the layers with the lowest and highest cosine, and the growth of residuals.

    Raises:
        LabkitError: The run has no compression statistics.
    """
    observed = observations(run)
    # Infinite values are dropped, because infinite values would make the mean infinite. An error
    # relative to a zero gradient is infinite.
    finite = observed.replace([np.inf, -np.inf], np.nan)
    layers = finite.groupby("layer", sort=False)[list(MEASURES)].mean()
    cosine = layers["cosine"].dropna()
    texts = []
    if len(cosine):
        worst, best = cosine.idxmin(), cosine.idxmax()
        texts.append(
            "Over all steps, the cosine between compressed and true mean gradient is lowest in "
            f"layer **{worst}** ({cosine[worst]:.3g}, relative error "
            f"{layers['relative_error'][worst]:.3g}) and highest in **{best}** "
            f"({cosine[best]:.3g})"
        )
    texts.append(
        f"Compressed layers use {_range_text(layers['bits_per_parameter'])} bits per parameter "
        f"and send {_range_text(layers['fraction_sent'])} of their elements"
    )
    texts += _residuals(finite)
    spoiled = observed.loc[~np.isfinite(observed["relative_error"].astype(float)), "layer"]
    if len(spoiled):
        unique = [str(name) for name in spoiled.unique()]
        more = f" and {len(unique) - _NAMED:,} more" if len(unique) > _NAMED else ""
        names = f"{', '.join(unique[:_NAMED])}{more}"
        texts.append(
            f"{len(spoiled)} rows of the statistics, of {names}, have no finite error, because "
            "the gradient is zero or not finite"
        )
    return sentences(map(Finding, texts))


def _range_text(values: pd.Series[float]) -> str:
    """Format a range of values, such as `0.1 to 0.5`, or one value if all values are equal."""
    ends = dict.fromkeys(f"{end:.3g}" for end in (values.min(), values.max()))
    return " to ".join(ends)


def _residuals(finite: pd.DataFrame) -> list[str]:
    """Compare residual norms of the last quarter of the steps with those of the quarter before."""
    steps = np.sort(finite["step"].unique())
    norms = finite.groupby("step")["residual_norm"].mean()
    quarter = len(steps) // 4
    if not quarter or not norms.max() > 0:
        return []
    last_quarter, previous_quarter = (
        norms.iloc[-quarter:].mean(),
        norms.iloc[-2 * quarter : -quarter].mean(),
    )
    # A residual counts as growing only above five percent, because a smaller growth may be due to
    # chance.
    grows = "still grows" if last_quarter > 1.05 * previous_quarter else "has stopped growing"
    return [
        f"The error-feedback residual {grows}: its mean norm is {last_quarter:.3g} in the last "
        f"quarter of the steps, {previous_quarter:.3g} in the quarter before"
    ]


def _panel(observed: pd.DataFrame, measure: str, looks: dict[str, LineStyle]) -> Panel:
    title, y = MEASURES[measure]
    finite = observed[np.isfinite(observed[measure].astype(float))]
    steps = finite.assign(layer=finite["layer"].astype(str)).groupby(["layer", "step"])[measure]
    table = steps.agg(["mean", "min", "max"]).reset_index()
    table.columns = ["layer", "step", "value", "value_low", "value_high"]
    if len(looks) > _BANDS:
        table = table[["layer", "step", "value"]]
    # Only every n-th step is drawn, because a browser takes seconds to draw all steps of many
    # layers.
    thinned = table.groupby("layer").cumcount() % (len(table) // len(looks) // POINTS + 1) == 0
    traces = line_with_band(table[thinned], "step", "value", looks, by="layer")
    look = {} if measure == "cosine" else {"rangemode": "tozero"}
    return Panel(title, "step", y, traces, "no layer has this statistic", y_axis=look, link="step")
