"""Models that learn from each other, beside one model and an ensemble of as many gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.columns import spread
from labkit.records.analysis.ensemble import ensemble_accuracy
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

_PERCENT = "{:.1%}".format
_ONE, _ENSEMBLE, _ALONE = "one model", "an ensemble", "a model alone"


def codistillation_table(
    one: Run, taught: Sequence[Run], ensembles: Sequence[Sequence[Run]]
) -> pd.DataFrame:
    """A row a way: accuracy, its ends, seeds, and bytes on the wire a step and seconds of a run.

    Args:
        one: model, which all workers train in step.
        taught: by codistillation of as many workers.
        ensembles: of as many models that are trained alone, one a seed; the mean of their
            predictions counts.
    """
    import pandas as pd

    rows = {}
    for run in (one, *taught):
        accuracy = float(run.metrics["test_accuracy"])
        ends = spread(run, "test_accuracy") or (accuracy, accuracy)
        spent = float(run.metrics["wire_bytes_per_step"]), float(run.metrics["train_seconds"])
        rows[_way(run)] = (accuracy, *ends, int(run.metrics.get("repeats", 1)), *spent)
    together = [ensemble_accuracy(members) for members in ensembles]
    alone = [float(run.metrics["test_accuracy"]) for members in ensembles for run in members]
    lasted = mean(float(run.metrics["train_seconds"]) for each in ensembles for run in each)
    for way, found in ((_ENSEMBLE, together), (_ALONE, alone)):
        rows[way] = (mean(found), min(found), max(found), len(found), 0.0, lasted)
    columns = ["accuracy", "low", "high", "seeds", "bytes", "seconds"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("way")


def codistillation_reading(table: pd.DataFrame) -> Markdown:
    """What as many gradients teach one model, models that learn from each other, and an ensemble.

    Published: a model that learns from another one's predictions is better than one that is
    trained alone, with more workers in step (Anil 2018, arXiv 1804.03235).

    Args:
        table: see `codistillation_table`.
    """
    return sentences([*_said(table), *_concluded(table)])


def _said(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.drop(index=_ALONE).itertuples():
        said = f"{bytes_text(row.bytes)} on the wire a step, {seconds_text(row.seconds)} long"
        if row.Index == _ENSEMBLE:
            alone = _PERCENT(table["accuracy"][_ALONE])
            said = f"one of its models {alone}; each row is predicted by all of them"
        band = row.low, row.high
        yield Finding("", str(row.Index), row.accuracy, band, row.seeds, _PERCENT, said=(said,))


def _concluded(table: pd.DataFrame) -> Iterator[Finding]:
    one, together = table.loc[_ONE], table.loc[_ENSEMBLE]
    taught = table.drop(index=[_ONE, _ENSEMBLE, _ALONE])
    ours = ", ".join(f"{row.Index} {_PERCENT(row.accuracy)}" for row in taught.itertuples())
    came = it_came(bool(taught["low"].min() > one["high"]))
    yield Finding(
        "**Models that learn from each other are better than one of as many gradients, beyond the "
        f"seeds** (Anil 2018): {came}",
        said=(f"{ours}; one model {_PERCENT(one['accuracy'])}",),
    )
    better, worse = together["low"] > taught["high"].max(), together["high"] < taught["low"].min()
    words = "better" if better else "worse" if worse else "no different beyond the seeds"
    yield Finding(f"An ensemble of as many gradients, beside a model that was taught: **{words}**")


def _way(run: Run) -> str:
    exchange = run.experiment["strategy"].get("exchange")
    return f"codistilled by {exchange}" if exchange else _ONE
