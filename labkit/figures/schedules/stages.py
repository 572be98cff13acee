"""Models in pipeline stages: memory, traffic, bubbles and speed-ups of each run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.errors import LabkitError
from labkit.common.units import bytes_text
from labkit.figures.kit.axes import counts_axis
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    Line,
    clock_and_network,
    completed_entries,
    entries,
    lines,
)
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import points, rule
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.records.run import Run
from labkit.records.stage_rows import pipeline_row, rank_row
from labkit.records.staged_steps import measured_pipeline, predicted_pipeline, staged

__all__ = ["measured_pipeline", "pipeline_table", "predicted_pipeline", "rank_table"]


def rank_table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    r"""Return a row a run and rank: time and traffic of a step, and memory by kind.

    `stages` on the rank; `utilisation`: share of the steady steps' time in which it computes;
    `step_ms`, median; `payload_bytes` and `messages` that it hands over in a step, mean;
    `whole_bytes`: all weights of the model, which a rank holds before and after training. Of each
    kind, weights, gradients, optimizer, activations and versions (old weights that a backward pass
    still needs), `…_bytes` as measured, `…_predicted` from shapes and schedule, and `…_error` =
    measured / predicted - 1; `bytes` and `bytes_predicted` of all kinds together. Peaks of kinds
    need not come at the same moment. Values without a measurement are missing, and so are the times
    of a run whose equivalence gate failed.

    Raises: LabkitError, where there are no runs, or one has no results.
    """
    rows = [
        {"run": entry.label, **rank_row(entry.run, part)}
        for entry in completed_entries(runs)
        for part in entry.metrics.get("memory", [])
    ]
    return pd.DataFrame(rows).set_index(["run", "rank"])


def pipeline_table(runs: Iterable[Run] | Run, baseline: Run | None = None) -> pd.DataFrame:
    r"""Return a row a run of a model in stages: bubbles and speed-ups, measured and in theory.

    `bubble_measured`: share of all ranks' time, from the first row of a step to its last, in which
    they do not compute, the median of the steady steps (`_low`, `_high`: 10th and 90th
    percentile); `bubble_simulated` with the seconds of each stage and the run's network;
    `bubble_formula`, the method's own, of equal stages and free messages
    (`Table.bubble_share`). `schedule_ms` and `simulated_ms`: from a step's
    first row to its last. `speedup` over the baseline (`_low`, `_high` from p90 and p10 of the
    step), at most `bound`: p (1 - bubble_formula), which is m p/(m + p - 1) for GPipe; for
    delayed gradients \(3/(1 + 2/K)\), where a backward takes two forwards; of stages in `slices`
    as many times that. `ranks` are those of one slice.

    Args:
        runs: runs of other strategies are left out.
        baseline: one process on the same batches; default: the first of the runs with workers=1.

    Raises: LabkitError, where there are no runs of models in stages, or one has no results.
    """
    shown = completed_entries(runs)
    # The first with one worker, as a person would take it.
    base = baseline or next((e.run for e in shown if e.run.experiment["workers"] == 1), None)
    chosen = [
        entry
        for entry in shown
        if staged(entry.run) and (base is None or entry.run.path != base.path)
    ]
    if not chosen:
        raise LabkitError("no runs of lk.Pipeline, lk.Layerwise or lk.DelayedGradients here")
    rows = [pipeline_row(entry.run, base) for entry in chosen]
    return pd.DataFrame(rows, index=pd.Index([entry.label for entry in chosen], name="run"))


Row = dict[str, float]

GAIN = 1.05  # a smaller speed-up is noise, because steps vary by some percent
NEAR = 0.9  # of what is possible


def pipeline_reading(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """Say the bubble and speed-up of each run, and the gain of more micro-batches.

    Args and raises: as `pipeline_table`.
    """
    table = pipeline_table(runs, baseline)
    findings = [
        Finding(f"**{label}**", details=tuple(_bubbles(row))) for label, row in _rows(table)
    ]
    for (schedule, ranks), rows in table.groupby(["schedule", "ranks"], sort=False):
        known = rows.dropna(subset=["speedup"]).sort_values("microbatches")
        if known["microbatches"].nunique() > 1:
            findings.append(Finding(f"**{schedule}** on {ranks} ranks", details=(_growth(known),)))
    return sentences(findings)


def cut_reading(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """Compare ways to cut a model: memory, idle time, traffic and length of a step.

    Args: runs: of one model; baseline: a run of one process to compare with; default: the
    first of the runs with workers=1.
    Raises: as `rank_table`.
    """
    given = [runs] if isinstance(runs, Run) else list(runs)
    table = rank_table(given)
    # Replicas do not measure activations: the prediction replaces them, and the text says so.
    table["counted"] = table["bytes"].notna()
    table["bytes"] = table["bytes"].fillna(table["bytes_predicted"])
    by_run = table.groupby(level="run", sort=False).agg(
        # The fullest rank must fit its machine, and the slowest sets the pace; idleness is
        # everybody's.
        bytes=("bytes", "max"),
        counted=("counted", "all"),
        payload=("payload_bytes", "max"),
        utilisation=("utilisation", "mean"),
        step_ms=("step_ms", "max"),
    )
    base = baseline or next((run for run in given if run.experiment["workers"] == 1), None)
    # The baseline's row by its place: the table keeps the order of the runs.
    places = [number for number, run in enumerate(given) if base and run.path == base.path]
    group = by_run.iloc[places[0]].to_dict() if places else None
    findings = [
        Finding(f"**{label}**", details=(", ".join(_cut(row, group)),))
        for label, row in _rows(by_run)
    ]
    return sentences([*findings, *([Finding(_extremes(by_run))] if len(by_run) > 1 else [])])


def _rows(table: pd.DataFrame) -> Iterable[tuple[str, Row]]:
    return zip(table.index, table.to_dict("records"), strict=True)


def _bubbles(row: Row) -> Iterable[str]:
    if _known(row["bubble_measured"]):
        yield (
            f"ranks wait {row['bubble_measured']:.0%} of a step "
            f"({row['bubble_low']:.0%} to {row['bubble_high']:.0%})"
        )
    yield f"the simulation with the seconds of these stages says {row['bubble_simulated']:.0%}"
    if _known(row["bubble_formula"]):
        yield f"the formula of equal stages {row['bubble_formula']:.0%}"
    if _known(row["speedup"]) and _known(row["bound"]):
        yield f"speed-up {row['speedup']:.2f}, at most {row['bound']:.2f} by theory"


def _growth(rows: pd.DataFrame) -> str:
    first, last = rows.iloc[0], rows.iloc[-1]
    details = (
        f"from {first['microbatches']} to {last['microbatches']} micro-batches the speed-up goes "
        f"from {first['speedup']:.2f} to {last['speedup']:.2f}"
    )
    if first["microbatches"] == 1 and first["speedup"] < GAIN:
        details += "; one micro-batch brings no time, for its stages wait for each other"
    if not _known(last["bound"]):
        return details
    share = last["speedup"] / last["bound"]
    if share >= NEAR:
        return f"{details}; the last is {share:.0%} of what the bubble allows"
    return (
        f"{details}; that is {share:.0%} of what the bubble allows: the rest goes to unequal "
        "stages, messages, small micro-batches and what processes on one machine take from each "
        "other"
    )


def _cut(row: Row, group: Row | None) -> Iterable[str]:
    if _known(row["bytes"]):
        held = f"the fullest rank keeps {bytes_text(row['bytes'])}"
        if group is not None and _known(group["bytes"]):
            held += f" ({_share(row['bytes'] / group['bytes'])} of one process)"
        yield held if row["counted"] else f"{held}, as predicted"
    yield f"the busiest hands over {bytes_text(row['payload'])} a step"
    if _known(row["utilisation"]):
        yield f"ranks compute {row['utilisation']:.0%} of the time"
    if _known(row["step_ms"]):
        step = f"a step takes {row['step_ms']:.3g} ms"
        if group is not None and _known(group["step_ms"]):
            step += f", {_share(row['step_ms'] / group['step_ms'])} of one process"
        yield step


def _share(value: float) -> str:
    """Return three digits, because more of a short step would be noise."""
    return f"{value:.2f}" if value < 10 else f"{value:.3g}"


def _extremes(table: pd.DataFrame) -> str:
    texts = []
    if table["bytes"].notna().any():
        texts.append(f"least memory on a rank: **{table['bytes'].idxmin()}**")
    if table["step_ms"].notna().any():
        texts.append(f"shortest step: **{table['step_ms'].idxmin()}**")
    sending = table[table["payload"] > 0]["payload"]
    if len(sending):
        texts.append(f"least traffic of those that send: **{sending.idxmin()}**")
    text = "; ".join(texts)
    return f"{text[:1].upper()}{text[1:]}"


def _known(value: float) -> bool:
    return value == value  # missing values of a table are NaN, which equals nothing


def pipeline_speedup(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Figure:
    r"""Draw speed-up over micro-batches, a point a run, with the ideal as a dashed curve.

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
        x_axis=counts_axis(table["microbatches"].tolist()),
        y_axis={"rangemode": "tozero"},
    )
    legend = [*looks.values(), Line("ideal, m p/(m + p - 1)", INK, "dash", "line-ew")]
    words = [_in_words(row) for row in table.itertuples()]
    remarks = ["whiskers: slow and fast steps (p90, p10)"]
    return sheet([[panel]], legend, title, remarks, words, plot=300)


def _ideal(ranks: int, most: int) -> Trace:
    m = np.geomspace(1, max(most, 2), 50)
    details = {
        "hoverinfo": "y",
        "hovertemplate": f"ideal of {ranks} ranks: %{{y:.3g}}<extra></extra>",
    }
    return rule(m.tolist(), (m * ranks / (m + ranks - 1)).tolist(), "dash") | details


def _in_words(row: Any) -> str:
    # A number that is not equal to itself is NaN: it was not measured, or the gate failed.
    details = "no speed-up known" if row.speedup != row.speedup else f"speed-up {row.speedup:.2f}"
    called = f"{row.schedule}, {row.ranks} ranks, m = {row.microbatches}"
    most = "" if row.bound != row.bound else f", at most {row.bound:.2f}"
    return f"{called}: {details}{most}"
