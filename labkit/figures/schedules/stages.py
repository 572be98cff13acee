"""Tables and figures of pipeline-parallel runs: memory, traffic, bubbles and speed-ups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from labkit.common.errors import LabkitError
from labkit.common.units import bytes_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    INK,
    Finding,
    LineStyle,
    Markdown,
    clock_and_network,
    completed_entries,
    entries,
    lines,
    sentences,
)
from labkit.figures.kit.marks import points, rule
from labkit.figures.kit.panels import Panel, Trace, counts_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.run import Run
from labkit.records.stage_rows import pipeline_row, rank_row
from labkit.records.staged_steps import is_staged, measured_pipeline, predicted_pipeline

__all__ = ["measured_pipeline", "pipeline_table", "predicted_pipeline", "rank_table"]


def rank_table(runs: Iterable[Run] | Run) -> pd.DataFrame:
    r"""Return one row per run and rank: time and traffic of a step, and memory by category.

    The column `stages` lists the pipeline stages on the rank. The column `utilisation` is the share
    of step time in which the rank computes, over steady steps. The column `step_ms` is the median
    step time. The columns `payload_bytes` and `messages` state how many bytes and messages the rank
    sends per step, on average. The column `whole_bytes` is the size of all weights of the model.
    Each rank stores all weights before and after training. The categories of memory are weights,
    gradients, optimizer, activations, and versions. Versions are old weights that a backward pass
    still needs. For each category of memory, the column `…_bytes` is the measured peak. The column
    `…_predicted` comes from shapes and the schedule. The column `…_error` is measured / predicted -
    1. The columns `bytes` and `bytes_predicted` are sums over the categories of memory. The peaks
    of the categories may occur at different times. A value that was not measured is a missing value
    in the table. The table has no times for a run that failed its equivalence check.

    Raises:
        LabkitError: There are no runs, or a run has no results.
    """
    rows = [
        {"run": entry.label, **rank_row(entry.run, part)}
        for entry in completed_entries(runs)
        for part in entry.metrics.get("memory", [])
    ]
    return pd.DataFrame(rows).set_index(["run", "rank"])


def pipeline_table(runs: Iterable[Run] | Run, baseline: Run | None = None) -> pd.DataFrame:
    r"""Return one row per pipeline run: bubble and speed-up, as measured and by theory.

    The column `bubble_measured` is the idle share of all ranks' time in a step. The step's time
    lasts from its first to its last action. The measured bubble is the median over steady steps.
    Columns with `_low` contain the 10th percentile, and columns with `_high` the 90th percentile.
    The column `bubble_simulated` comes from a simulation on the network of the run. The simulation
    uses the measured seconds of each stage. The column `bubble_formula` is the theoretical bubble
    for stages of equal duration. The column `schedule_ms` is the measured time of a step's actions.
    The column `simulated_ms` is the simulated time of a step's actions. The time of a step lasts
    from its first to its last action. The column `speedup` is the baseline's step time divided by
    the run's step time. The columns `speedup_low` and `speedup_high` are computed from the 90th and
    the 10th percentile of the step time. The column `bound` is the greatest speed-up that the
    schedule allows. With m micro-batches and p stages, GPipe's greatest speed-up is m p/(m + p -
    1). For delayed gradients on K stages, the bound is \(3/(1 + 2/K)\). The bound \(3/(1 + 2/K)\)
    assumes backward passes twice as long as forward passes. If each stage is divided into
    `tensor_parallel_size` slices, the bound is multiplied by the number of slices. If stages are
    divided into slices, the column `ranks` counts only the ranks of one slice.

    Args:
        runs: Runs; the table omits runs that are not pipeline-parallel.
        baseline: Run of one process on the same batches, to which the speed-ups refer. By default,
            it is the first run with workers=1.

    Raises:
        LabkitError: There are no pipeline-parallel runs, or a run has no results.
    """
    shown = completed_entries(runs)
    # Speed-ups refer to the first run with one worker, unless the caller names a baseline.
    base = baseline or next((e.run for e in shown if e.run.experiment["workers"] == 1), None)
    chosen = [
        entry
        for entry in shown
        if is_staged(entry.run) and (base is None or entry.run.path != base.path)
    ]
    if not chosen:
        raise LabkitError(
            "no run of lk.Pipeline, lk.Layerwise or lk.DelayedGradients was given; give at least "
            "one"
        )
    rows = [pipeline_row(entry.run, base) for entry in chosen]
    return pd.DataFrame(rows, index=pd.Index([entry.label for entry in chosen], name="run"))


Row = dict[str, float]

GAIN = 1.05  # a speed-up below this factor is noise, because step times vary by some percent
NEAR = 0.9  # a speed-up reaches its upper bound if it is at least this fraction of the bound


def summarize_pipeline(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """Summarize the bubble and speed-up of each run, and the gain from more micro-batches.

    Arguments and exceptions are the same as for `pipeline_table`.
    """
    table = pipeline_table(runs, baseline)
    findings = [
        Finding(f"**{label}**", details=tuple(_bubbles(row))) for label, row in _rows(table)
    ]
    for (schedule, ranks), rows in table.groupby(["schedule", "ranks"], sort=False):
        known = rows.dropna(subset=["speedup"]).sort_values("microbatches")
        if known["microbatches"].nunique() > 1:
            findings.append(
                Finding(f"**{schedule}** on {ranks} ranks", details=(_microbatch_gain(known),))
            )
    return sentences(findings)


def summarize_cut(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Markdown:
    """Compare ways to divide a model among ranks: memory, idle time, traffic and step time.

    Args:
        runs: Runs of one model with different strategies.
        baseline: Run of one process as the reference; default: the first run with workers=1.

    Raises:
        LabkitError: There are no runs, or a run has no results.
    """
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    table = rank_table(all_runs)
    # Data-parallel runs do not measure activations, so the predicted bytes replace the measured
    # ones. The summary states that the bytes of data-parallel runs are predicted.
    table["counted"] = table["bytes"].notna()
    table["bytes"] = table["bytes"].fillna(table["bytes_predicted"])
    by_run = table.groupby(level="run", sort=False).agg(
        # The rank with the most memory must fit its machine. The slowest rank determines the step
        # time. The table therefore contains the maxima of memory and step time.
        bytes=("bytes", "max"),
        counted=("counted", "all"),
        payload=("payload_bytes", "max"),
        utilisation=("utilisation", "mean"),
        step_ms=("step_ms", "max"),
    )
    base = baseline or next((run for run in all_runs if run.experiment["workers"] == 1), None)
    # The table `by_run` has one row per run. The table and the list of runs have the same order.
    places = [number for number, run in enumerate(all_runs) if base and run.path == base.path]
    group = by_run.iloc[places[0]].to_dict() if places else None
    findings = [
        Finding(f"**{label}**", details=(", ".join(_rank_details(row, group)),))
        for label, row in _rows(by_run)
    ]
    return sentences([*findings, *([Finding(_extremes(by_run))] if len(by_run) > 1 else [])])


def _rows(table: pd.DataFrame) -> Iterable[tuple[str, Row]]:
    return zip(table.index, table.to_dict("records"), strict=True)


def _bubbles(row: Row) -> Iterable[str]:
    if _known(row["bubble_measured"]):
        yield (
            f"measured bubble {row['bubble_measured']:.0%} of a step "
            f"({row['bubble_low']:.0%} to {row['bubble_high']:.0%})"
        )
    yield f"bubble simulated with the measured times of the stages: {row['bubble_simulated']:.0%}"
    if _known(row["bubble_formula"]):
        yield f"bubble by the formula for equal stages: {row['bubble_formula']:.0%}"
    if _known(row["speedup"]) and _known(row["bound"]):
        yield f"speed-up {row['speedup']:.2f}, at most {row['bound']:.2f} by theory"


def _microbatch_gain(rows: pd.DataFrame) -> str:
    first, last = rows.iloc[0], rows.iloc[-1]
    details = (
        f"from {first['microbatches']} to {last['microbatches']} micro-batches, the speed-up "
        f"changes from {first['speedup']:.2f} to {last['speedup']:.2f}"
    )
    if first["microbatches"] == 1 and first["speedup"] < GAIN:
        details += "; one micro-batch gives no speed-up, because stages wait for each other"
    if not _known(last["bound"]):
        return details
    share = last["speedup"] / last["bound"]
    if share >= NEAR:
        return f"{details}; the last speed-up is {share:.0%} of the pipeline bubble's limit"
    return (
        f"{details}; the last speed-up is {share:.0%} of the pipeline bubble's limit: unequal "
        "stages, messages, small micro-batches and shared cores explain the "
        "rest"
    )


def _rank_details(row: Row, group: Row | None) -> Iterable[str]:
    if _known(row["bytes"]):
        memory = f"the rank with the most memory keeps {bytes_text(row['bytes'])}"
        if group is not None and _known(group["bytes"]):
            memory += f" ({_share(row['bytes'] / group['bytes'])} of one process)"
        yield memory if row["counted"] else f"{memory}, as predicted"
    yield f"the busiest rank sends {bytes_text(row['payload'])} per step"
    if _known(row["utilisation"]):
        yield f"ranks compute {row['utilisation']:.0%} of the time"
    if _known(row["step_ms"]):
        step = f"a step takes {row['step_ms']:.3g} ms"
        if group is not None and _known(group["step_ms"]):
            step += f", {_share(row['step_ms'] / group['step_ms'])} of one process"
        yield step


def _share(value: float) -> str:
    """Format a ratio with three digits, because further digits are noise."""
    return f"{value:.2f}" if value < 10 else f"{value:.3g}"


def _extremes(table: pd.DataFrame) -> str:
    texts = []
    if table["bytes"].notna().any():
        texts.append(f"least memory on a rank: **{table['bytes'].idxmin()}**")
    if table["step_ms"].notna().any():
        texts.append(f"shortest step: **{table['step_ms'].idxmin()}**")
    sending = table[table["payload"] > 0]["payload"]
    if len(sending):
        texts.append(f"least traffic of the runs that send: **{sending.idxmin()}**")
    text = "; ".join(texts)
    return f"{text[:1].upper()}{text[1:]}"


def _known(value: float) -> bool:
    # The result is false for NaN (a missing value), which does not equal itself.
    return value == value


def pipeline_speedup(runs: Iterable[Run] | Run, baseline: Run | None = None) -> Figure:
    r"""Draw speed-up over the number of micro-batches: a point per run, and a dashed ideal curve.

    For m micro-batches in p equal stages, the ideal speed-up is \(\frac{m p}{m + p - 1}\). The
    ideal speed-up assumes that messages take no time. The ideal speed-up is an upper bound for the
    schedules GPipe and 1F1B. Arguments and exceptions are the same as for `pipeline_table`.
    """
    all_runs = [runs] if isinstance(runs, Run) else list(runs)
    table = pipeline_table(all_runs, baseline)
    named = [f"{row.schedule}, {row.ranks} ranks" for row in table.itertuples()]
    looks = lines(named)
    most = int(table["microbatches"].max())
    ideals = [_ideal(int(ranks), most) for ranks in sorted(set(table["ranks"]))]
    table = table.assign(
        hover=[f"m = {row.microbatches}: {row.speedup:.3g}" for row in table.itertuples()]
    )
    measured = [
        points(table[[name == label for label in named]], "microbatches", "speedup", look, size=10)
        for name, look in looks.items()
    ]
    title = f"Pipeline speed-up · {clock_and_network(entries(all_runs))}"
    panel = Panel(
        title="Speed-up over one process with the same batches",
        x="micro-batches",
        y="speed-up",
        traces=[*ideals, *measured],
        x_axis=counts_axis(table["microbatches"].tolist()),
        y_axis={"rangemode": "tozero"},
    )
    legend = [*looks.values(), LineStyle("ideal, m p/(m + p - 1)", INK, "dash", "line-ew")]
    words = [_in_words(row) for row in table.itertuples()]
    remarks = ["whiskers: speed-up of slow and fast steps (p90 and p10 of the step time)"]
    return sheet([[panel]], legend, title, remarks, words, plot=300)


def _ideal(ranks: int, most: int) -> Trace:
    m = np.geomspace(1, max(most, 2), 50)
    details = {
        "hoverinfo": "y",
        "hovertemplate": f"ideal of {ranks} ranks: %{{y:.3g}}<extra></extra>",
    }
    return rule(m.tolist(), (m * ranks / (m + ranks - 1)).tolist(), "dash") | details


def _in_words(row: Any) -> str:
    # The speed-up is NaN if the run was not measured. The speed-up is also NaN if the run failed
    # its equivalence check. A NaN value does not equal itself.
    details = "speed-up unknown" if row.speedup != row.speedup else f"speed-up {row.speedup:.2f}"
    label = f"{row.schedule}, {row.ranks} ranks, m = {row.microbatches}"
    most = "" if row.bound != row.bound else f", at most {row.bound:.2f}"
    return f"{label}: {details}{most}"
