"""Errors, residuals and bits of compressed gradients, layer by layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from labkit.common.errors import LabkitError
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Line, clock_and_network, compressor_text, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.figures.runs.learning import POINTS
from labkit.records.compressors import method
from labkit.records.run import Run
from labkit.records.verdict import seeds_of

MEASURES = {
    "relative_error": ("Relative error", "of the norm of the gradient"),
    "cosine": ("Cosine", "to the true mean gradient"),
    "residual_norm": ("Residual", "norm of what is carried over"),
    "bits_per_parameter": ("Bits a parameter", "bits"),
    "fraction_sent": ("Fraction sent", "share of the elements"),
}
_LINES = 60  # layers that are drawn; more are indistinguishable
_NAMED = 6  # layers that a sentence names
_BANDS = 6  # layers with bands of ranks and seeds; more bands would cover each other


def microscope(run: Run) -> Figure:
    """Draw relative error, cosine, residual, bits and fraction sent over steps, a line a layer.

    Lines are means over ranks and seeds, bands reach from the least to the greatest of them.
    Raises LabkitError where nothing was looked at.
    """
    observed = observations(run)
    layers = observed["layer"].unique()
    shown = layers[:: -(-len(layers) // _LINES)]
    looks = lines(map(str, shown))
    drawn = observed[observed["layer"].isin(shown)]
    panels = [_panel(drawn, measure, looks) for measure in MEASURES]
    where = clock_and_network(entries([run]))
    compressor = compressor_text(method(run), with_feedback=True)
    title = f"Compression under the microscope · {compressor} · {where}"
    remarks = ["mean over ranks and seeds; values that are not finite are left out"]
    if len(shown) < len(layers):
        remarks.append(f"{len(shown)} of {len(layers):,} layers are drawn, evenly over all")
    words = str(microscope_reading(run)).replace("**", "").replace("\n- ", " ").lstrip("- ")
    return sheet([panels[:2], panels[2:]], looks.values(), title, remarks, [words.rstrip(".")])


def observations(run: Run) -> pd.DataFrame:
    """Return the compression statistics of all seeds of a run, with a column `seed`.

    Raises: LabkitError, where nothing was looked at.
    """
    parts = {each.experiment["seed"]: each.microscope for each in seeds_of(run)}
    tables = [part.assign(seed=seed) for seed, part in parts.items() if len(part)]
    if not tables:
        raise LabkitError(
            f"nothing of {run.name} was put under the microscope (state: {run.status['state']}); "
            "a completed run with lk.AllReduce(compressor=…, microscope=10) has rows"
        )
    return pd.concat(tables, ignore_index=True)


def microscope_reading(run: Run) -> Markdown:
    """Name the layers with the worst and the best cosine, and say whether residuals grow.

    Raises: LabkitError, where nothing was looked at.
    """
    observed = observations(run)
    # An error relative to a gradient of zeros is infinite; a mean over it would be, too.
    finite = observed.replace([np.inf, -np.inf], np.nan)
    layers = finite.groupby("layer", sort=False)[list(MEASURES)].mean()
    cosine = layers["cosine"].dropna()
    texts = []
    if len(cosine):
        worst, best = cosine.idxmin(), cosine.idxmax()
        texts.append(
            f"Over all steps the cosine to the true mean gradient is least in **{worst}** "
            f"({cosine[worst]:.3g}, relative error {layers['relative_error'][worst]:.3g}) and "
            f"greatest in **{best}** ({cosine[best]:.3g})"
        )
    texts.append(
        f"Layers take {_between(layers['bits_per_parameter'])} bits a parameter and send "
        f"{_between(layers['fraction_sent'])} of their elements"
    )
    texts += _residuals(finite)
    spoiled = observed.loc[~np.isfinite(observed["relative_error"].astype(float)), "layer"]
    if len(spoiled):
        unique = [str(name) for name in spoiled.unique()]
        more = f" and {len(unique) - _NAMED:,} more" if len(unique) > _NAMED else ""
        names = f"{', '.join(unique[:_NAMED])}{more}"
        texts.append(
            f"{len(spoiled)} rows have no finite error, of {names}"
            ": a gradient of nothing but zeros, or one that is not finite"
        )
    return sentences(map(Finding, texts))


def _between(values: pd.Series[float]) -> str:
    """Return `0.1 to 0.5`, or the one value."""
    ends = dict.fromkeys(f"{end:.3g}" for end in (values.min(), values.max()))
    return " to ".join(ends)


def _residuals(finite: pd.DataFrame) -> list[str]:
    """Compare the residuals of the last quarter of steps with those of the quarter before."""
    steps = np.sort(finite["step"].unique())
    norms = finite.groupby("step")["residual_norm"].mean()
    quarter = len(steps) // 4
    if not quarter or not norms.max() > 0:
        return []
    late, before = norms.iloc[-quarter:].mean(), norms.iloc[-2 * quarter : -quarter].mean()
    # Five percent: norms of two quarters of a run differ by chance.
    grows = "still grows" if late > 1.05 * before else "has stopped growing"
    return [
        f"The residual {grows}: its mean norm is {late:.3g} in the last quarter of the steps, "
        f"{before:.3g} in the quarter before"
    ]


def _panel(observed: pd.DataFrame, measure: str, looks: dict[str, Line]) -> Panel:
    title, y = MEASURES[measure]
    finite = observed[np.isfinite(observed[measure].astype(float))]
    steps = finite.assign(layer=finite["layer"].astype(str)).groupby(["layer", "step"])[measure]
    table = steps.agg(["mean", "min", "max"]).reset_index()
    table.columns = ["layer", "step", "value", "value_low", "value_high"]
    if len(looks) > _BANDS:
        table = table[["layer", "step", "value"]]
    # Each n-th point: with every step a file of many layers takes a browser seconds.
    thinned = table.groupby("layer").cumcount() % (len(table) // len(looks) // POINTS + 1) == 0
    traces = line_with_band(table[thinned], "step", "value", looks, by="layer")
    look = {} if measure == "cosine" else {"rangemode": "tozero"}
    return Panel(title, "step", y, traces, "no layer has one", y_axis=look, link="step")
