"""Speed-up of pipelines over the number of micro-batches, beside what the bubble allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.figures.cuts.stage_tables import pipeline_table
from labkit.figures.kit.entries import INK, Line, clock_and_network, entries, lines
from labkit.figures.kit.marks import points, rule
from labkit.figures.kit.sheet import Panel, Trace, sheet
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas

    from labkit.figures.kit.canvas import Figure


def pipeline_speedup(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Figure:
    r"""Speed-up against m: a point a run with the spread of its steps, the ideal as a dashed curve.

    The ideal is that of p equal stages and free messages, \(\frac{m p}{m + p - 1}\): what GPipe
    and 1F1B can reach.

    Args and raises: as `pipeline_table`.
    """
    given = [runs] if isinstance(runs, Run) else list(runs)
    table = pipeline_table(given, baseline)
    named = [f"{row.schedule}, {row.ranks} ranks" for row in table.itertuples()]
    looks = lines(named)
    most = int(table["microbatches"].max())
    ideals = [_ideal(int(ranks), most) for ranks in sorted(set(table["ranks"]))]
    table = table.assign(
        hover=[f"m = {row.microbatches}: {row.speedup:.3g}" for row in table.itertuples()]
    )
    measured = [
        points(table[[name == each for each in named]], "microbatches", "speedup", look, size=10)
        for name, look in looks.items()
    ]
    title = f"Pipeline speed-up · {clock_and_network(entries(given))}"
    panel = Panel(
        title="against one process with the same batches",
        x="micro-batches",
        y="speed-up",
        traces=[*ideals, *measured],
        x_axis={"type": "log"} | _ticks(table),
        y_axis={"rangemode": "tozero"},
    )
    legend = [*looks.values(), Line("ideal, m p/(m + p - 1)", INK, "dash", "line-ew")]
    words = [_in_words(row) for row in table.itertuples()]
    remarks = ["whiskers: slow and fast steps (p90, p10)"]
    return sheet([[panel]], legend, title, remarks, words, plot=300)


def _ideal(ranks: int, most: int) -> Trace:
    m = np.geomspace(1, max(most, 2), 50)
    said = {"hoverinfo": "y", "hovertemplate": f"ideal of {ranks} ranks: %{{y:.3g}}<extra></extra>"}
    return rule(m.tolist(), (m * ranks / (m + ranks - 1)).tolist(), "dash") | said


def _ticks(table: pandas.DataFrame) -> Trace:
    shown = sorted(set(table["microbatches"].tolist()))
    return {"tickvals": shown, "ticktext": [str(m) for m in shown]}


def _in_words(row: Any) -> str:
    # A number that is not equal to itself is NaN: it was not measured, or the gate failed.
    said = "no speed-up known" if row.speedup != row.speedup else f"speed-up {row.speedup:.2f}"
    called = f"{row.schedule}, {row.ranks} ranks, m = {row.microbatches}"
    most = "" if row.bound != row.bound else f", at most {row.bound:.2f}"
    return f"{called}: {said}{most}"
