"""Replicas whose weights differ: periodic synchronization, gossip, and codistillation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

import pandas as pd

from labkit.common.canonical_json import JSON
from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    Finding,
    Markdown,
    clock_and_network,
    entries,
    lines,
    published,
    sentences,
)
from labkit.figures.kit.marks import line_over_band, line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.accuracy import (
    PERCENT,
    accuracy_finding,
    accuracy_table,
    is_better,
    is_near,
    list_accuracies,
)
from labkit.records.analysis.curves import ensemble_accuracy, epoch_results, loss_curve
from labkit.records.compressors import compressor_expression, compressor_of
from labkit.records.run import Run
from labkit.records.verdict import arrivals
from labkit.strategies import Gossip

EACH_STEP, MEAN, ELASTIC = "every step", "averaging", "elastic averaging"
DELAYED, IMMEDIATE = "asynchronous, delayed Nesterov", "asynchronous, immediate Nesterov"
# Asynchronous runs must reach this fraction of the final accuracy of the run with delayed momentum.
NEARLY = 0.98
SHORT = range(8, 33)  # synchronization periods in steps that cost no accuracy according to Lin 2020

DISTANCE = "consensus_distance"
TOLERANCE = 1.02  # consensus distances count as equal if their ratio is below this value
# published ratio (Lian 2018) of the epoch time of allreduce to the epoch time of asynchronous
# gossip
PUBLISHED_SPEED = 4.0
COMPLETE, FREE = "all workers", ", asynchronous"

ONE, ENSEMBLE, SINGLE = "one model", "an ensemble", "a model alone"


def period_cost(runs: Iterable[Run]) -> Figure:
    """Draw test accuracy over the synchronization period: a line per rule, a band over the seeds.

    Args:
        runs: Runs whose replicas synchronize periodically; a run that synchronizes in every step
            has period 1.
    """
    shown = entries(runs)
    table = period_table([entry.run for entry in shown])
    looks = lines(dict.fromkeys(table["rule"]))
    panel = Panel(
        title="Accuracy by synchronization period\nmean over seeds; band: range over seeds",
        x="synchronization period, steps",
        y="test accuracy",
        traces=line_with_band(table, "period", "accuracy", looks, by="rule", marks=True),
        x_axis={"type": "log", "tickvals": sorted(set(table["period"]))},
        y_axis={"tickformat": ".0%"},
    )
    words = [f"{row.way}: {row.accuracy:.1%}" for row in table.itertuples()]
    title = f"Accuracy by period · {clock_and_network(shown)}"
    return sheet([[panel]], looks.values(), title, overload(shown), words, plot=300)


def summarize_period(runs: Sequence[Run]) -> Markdown:
    """Summarize the accuracy, bytes and time of each synchronization period.

    Published: synchronization periods of 8 to 32 steps cost no accuracy beyond the spread of seeds,
        while longer periods do (Lin 2020, arXiv 1808.07217). At long periods, an outer Nesterov
        optimizer is more accurate than plain averaging (Douillard 2023, arXiv 2311.08105), even if
        pseudo-gradients have only 4 bits (Douillard 2025, arXiv 2501.18512). Elastic averaging
        remains accurate at long synchronization periods (Zhang 2015, arXiv 1412.6651). Asynchronous
        workers need more steps without delayed Nesterov momentum than with it (Liu 2024, arXiv
        2401.09135).

    "Within the seeds" means that the ranges of two runs over seeds overlap. "Beyond the seeds"
    means that all seeds of one run beat all seeds of another. If a synchronization period is longer
    than the training, it is not judged.
    """
    table = period_table(runs)
    reached = table[table["period"] <= table["steps"]]
    findings = [*_periods(table), *_averaging(reached), *_elastic(reached)]
    return sentences([*findings, *_compressed_gradients(reached), *_delayed_momentum(reached)])


def period_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row per run: label (`way`), synchronization rule, codec, period, accuracy."""
    return accuracy_table(runs, _rule).sort_values(["rule", "period"], kind="stable")


def _rule(run: Run) -> dict[str, Any]:
    """Return a run's rule for synchronizing its replicas, the period in steps, and the codec."""
    strategy, epochs = run.experiment["strategy"], run.metrics.get("epochs") or [{}]
    rule, codec, period = EACH_STEP, "", strategy.get("period", 1)
    if "period" in strategy:
        known = {None: MEAN, "sgd": "outer SGD", "nesterov": "outer Nesterov"}
        momentum = DELAYED if strategy.get("momentum_delay", 1) > 1 else IMMEDIATE
        others = {"ElasticAveraging": ELASTIC, "AsynchronousDiLoCo": momentum}
        codec = _codec(compressor_of(run))
        rule = others.get(strategy["name"]) or known[strategy.get("outer_optimizer")]
        rule += f", {codec}" if codec else ""
        period = int((epochs[0].get("step") if period == "epoch" else period) or 1)
    way = rule if rule == EACH_STEP else f"{rule}, every {period}"
    steps = epochs[-1].get("step", math.inf)
    names = {"way": way, "rule": rule, "codec": codec}
    return names | {"period": period, "steps": steps, "run": run}


def _codec(compressor: Mapping[str, JSON] | None) -> str:
    """Describe in words how a compressor encodes values."""
    if compressor is None:
        return ""
    inner = compressor.get("inner")
    levels = (inner if isinstance(inner, Mapping) else compressor).get("levels")
    if isinstance(levels, int):
        # A compressor with n levels (`levels`) distinguishes 2n + 1 values. The values are n above
        # zero, n below zero, and zero itself.
        return f"in {(2 * levels).bit_length()} bits"
    return f"by {compressor_expression(dict(compressor))}"


def _periods(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        spent = (
            f"{bytes_text(row.wire_bytes)} on the wire per step, "
            f"{seconds_text(row.seconds)} of training"
        )
        never = f"training has {row.steps:.0f} steps, so replicas synchronized once, at the end"
        details = (spent, never) if row.period > row.steps else (spent,)
        yield accuracy_finding(row, "", row.way, *details)


def _claim(claim: str, source: str, holds: bool, *tables: pd.DataFrame) -> Finding:
    return published(claim, source, holds, "; ".join(map(list_accuracies, tables)))


def _averaging(table: pd.DataFrame) -> Iterator[Finding]:
    """Judge averaging at short and long periods, and the outer optimizer at the longest period."""
    every_step, means = (table[table["rule"] == rule] for rule in (EACH_STEP, MEAN))
    short_periods, long_periods = (
        means[means["period"].isin(SHORT)],
        means[means["period"] > max(SHORT)],
    )
    if len(every_step) and len(short_periods):
        claim = (
            "Synchronization periods of 8 to 32 steps cost no accuracy, within the spread of the "
            "seeds"
        )
        yield _claim(
            claim, "Lin 2020", is_near(short_periods, every_step), short_periods, every_step
        )
    if len(every_step) and len(long_periods):
        claim = (
            "Synchronization periods above 32 steps cost accuracy, beyond the spread of the seeds"
        )
        yield _claim(
            claim, "Lin 2020", is_better(every_step, long_periods), long_periods, every_step
        )
    outer = table[table["rule"] == "outer Nesterov"]
    yield from _at_longest_period("an outer Nesterov optimizer is", "Douillard 2023", outer, means)


def _elastic(table: pd.DataFrame) -> Iterator[Finding]:
    """Judge whether elastic averaging stays accurate at long synchronization periods."""
    elastic = table[table["rule"] == ELASTIC].sort_values("period")
    if elastic["period"].nunique() > 1:
        claim = "Elastic averaging tolerates long periods, within the spread of the seeds"
        yield _claim(claim, "Zhang 2015", is_near(elastic[-1:], elastic[:1]), elastic)
    means = table[table["rule"] == MEAN]
    yield from _at_longest_period("elastic averaging is", "Zhang 2015", elastic, means)


def _at_longest_period(
    rule: str, source: str, ours: pd.DataFrame, theirs: pd.DataFrame
) -> Iterator[Finding]:
    """Compare a rule with averaging at their longest common period, unless it is 8 to 32 steps."""
    longest = max({*ours["period"]} & {*theirs["period"]}, default=None)
    ours, theirs = ours[ours["period"] == longest], theirs[theirs["period"] == longest]
    if len(ours) and not ours["period"].isin(SHORT).any():
        claim = (
            f"At the longest synchronization period, {rule} more accurate than averaging, beyond "
            "the spread of the seeds"
        )
        yield _claim(claim, source, is_better(ours, theirs), ours, theirs)


def _compressed_gradients(table: pd.DataFrame) -> Iterator[Finding]:
    """At equal periods, compare accuracy with compressed and full-precision outer gradients."""
    coded = table[table["codec"] != ""]
    for (codec, period), ours in coded.groupby(["codec", "period"], sort=False):
        rule = ours["rule"].iloc[0].removesuffix(f", {codec}")
        full = table[(table["rule"] == rule) & (table["period"] == period)]
        if len(full):
            claim = (
                f"With outer gradients {codec}, the accuracy is that of full precision, within "
                "the spread of the seeds"
            )
            yield _claim(claim, "Douillard 2025", is_near(ours, full), ours, full)


def _delayed_momentum(table: pd.DataFrame) -> Iterator[Finding]:
    """For each period, compare the steps needed with and without delayed momentum."""
    delayed, immediate = (
        table[table["rule"] == rule].set_index("period") for rule in (DELAYED, IMMEDIATE)
    )
    for period in sorted({*delayed.index} & {*immediate.index}):
        target = NEARLY * float(delayed["accuracy"][period])
        ours, theirs = (
            [
                findings.step
                for findings in arrivals(group["run"][period], target).values()
                if findings
            ]
            for group in (delayed, immediate)
        )
        if not ours:
            continue
        missed = len(theirs) < immediate["seeds"][period]
        without = (
            "without delayed Nesterov, some seeds do not reach the accuracy"
            if missed
            else f"after {mean(theirs):.0f} steps without delayed Nesterov"
        )
        yield published(
            f"With period {period}, asynchronous workers need more steps without delayed "
            "Nesterov, beyond the spread of the seeds",
            "Liu 2024",
            missed or min(theirs) > max(ours),
            f"nearly the final accuracy of delayed Nesterov is reached after {mean(ours):.0f} "
            f"steps with delayed Nesterov; {without}",
        )


def consensus(runs: Iterable[Run]) -> Figure:
    """Draw the root-mean-square distance of replicas from their mean weights after each epoch.

    Args:
        runs: Runs of several replicas; runs whose workers always have equal weights are not drawn.
    """
    shown = entries(runs)
    traces, words = [], []
    for entry in shown:
        group = epoch_results(entry.run, loss_curve(entry.run.history))
        if DISTANCE in group:
            traces += line_over_band(group, "step", DISTANCE, entry, marks=True)
            words.append(f"{entry.label}: {group[DISTANCE].iloc[-1]:.3g} at the end")
    panel = Panel(
        title="Distance between replicas\nroot mean square distance of their weights from the mean",
        x="step",
        y="consensus distance",
        traces=traces,
        note="" if traces else "all workers have the same weights",
        y_axis={"rangemode": "tozero"},
    )
    title = f"Consensus distance · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, overload(shown), words, plot=300)


def gossip_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row per run: communication topology, consensus distance, accuracy, and cost.

    The first columns are topology (`way`), spectral gap, and final consensus distance of the
    weights. Further columns are accuracy with its range over seeds, and bytes on the wire per step.
    The last columns are the seconds of the training and of an epoch.
    """
    table = accuracy_table(runs, _topology)
    return table.assign(
        epoch_seconds=table["seconds"] / [int(r.experiment["epochs"]) for r in runs]
    )


def _topology(run: Run) -> dict[str, Any]:
    """Return the topology, the spectral gap (NaN without gossip), and the consensus distance."""
    fields = dict(run.experiment["strategy"])
    distance = (run.metrics.get("epochs") or [{}])[-1].get(DISTANCE, 0.0)
    if fields.pop("name") != "Gossip":
        return {"way": COMPLETE, "gap": math.nan, "distance": distance}
    strategy = Gossip.model_validate(fields)
    topology = strategy.topology if isinstance(strategy.topology, str) else "a matrix"
    way = topology.replace("_", " ") + (FREE if strategy.asynchronous else "")
    gap = strategy.spectral_gap(int(run.experiment["workers"]))
    return {"way": way, "gap": gap, "distance": distance}


def summarize_consensus(runs: Sequence[Run]) -> Markdown:
    """Summarize the consensus distance of each topology, and its cost in accuracy and time.

    Published: gossip between neighbours is as accurate as averaging over all workers, and takes
        less time on a slow network (Lian 2017, arXiv 1705.09056). On a graph with a larger spectral
        gap, the weights of the replicas differ less (Assran 2019).
    """
    table = gossip_table(runs)
    return sentences([*_topologies(table), *_gossip_claims(table)])


def summarize_slow_worker(runs: Sequence[Run]) -> Markdown:
    """Summarize the epoch time of each topology if one worker is slow.

    Published: if one worker is 10 times slower, an epoch of asynchronous gossip is at least 4 times
    as fast as an epoch with an allreduce (Lian 2018, arXiv 1710.06952).
    """
    table = gossip_table(runs)
    findings = [
        Finding(
            "",
            row.way,
            row.epoch_seconds,
            text=seconds_text,
            details=(f"accuracy {row.accuracy:.1%}",),
        )
        for row in table.itertuples()
    ]
    asynchronous = table[table["way"].str.endswith(FREE)]["epoch_seconds"]
    allreduce = table[table["way"] == COMPLETE]["epoch_seconds"]
    if len(asynchronous) and len(allreduce):
        factor = float(allreduce.min() / asynchronous.max())
        claim = "An epoch of asynchronous gossip is at least 4 times as fast as one with allreduce"
        holds = factor >= PUBLISHED_SPEED
        findings.append(published(claim, "Lian 2018", holds, f"{factor:.2g} times as fast"))
    return sentences(findings)


def _topologies(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        spent = (
            f"{seconds_text(row.seconds)} of training, "
            f"{bytes_text(row.wire_bytes)} on the wire per step"
        )
        distance = "all workers have the same weights"
        if not math.isnan(row.gap):
            distance = (
                f"spectral gap {row.gap:.3g}, consensus distance {row.distance:.3g} at the end"
            )
        yield accuracy_finding(row, "", row.way, spent, distance)


def _gossip_claims(table: pd.DataFrame) -> Iterator[Finding]:
    graphs = table[table["gap"].notna()].sort_values("gap")
    all_workers = table[table["gap"].isna()]
    if len(graphs) and len(all_workers):
        accuracies = "; ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())
        claim = (
            "Gossip between neighbours is as accurate as averaging over all workers, within the "
            "spread of the seeds"
        )
        yield published(claim, "Lian 2017", is_near(graphs, all_workers), accuracies)
        sooner = bool(graphs["seconds"].max() < all_workers["seconds"].min())
        times = "; ".join(f"{row.way} {seconds_text(row.seconds)}" for row in table.itertuples())
        yield published(
            "Gossip trains faster than averaging over all workers on this network",
            "Lian 2017",
            sooner,
            times,
        )
    if len(graphs) > 1:
        near = all(b <= a * TOLERANCE for a, b in pairwise(graphs["distance"]))
        pairs = "; ".join(f"{r.way} {r.gap:.3g}, {r.distance:.3g}" for r in graphs.itertuples())
        yield published(
            "A larger spectral gap of the topology keeps replicas closer to their mean",
            "Assran 2019",
            near,
            pairs,
        )


def codistillation_table(
    one: Run, taught: Sequence[Run], ensembles: Sequence[Sequence[Run]]
) -> pd.DataFrame:
    """Return one row per training method, with accuracy, seeds, bytes per step, and seconds.

    Args:
        one: Run in which all workers train a single model synchronously.
        taught: Runs of codistilled models, with the same number of workers as the run `one`.
        ensembles: For each seed, runs of separately trained models, one model per worker. The
            ensemble averages the predictions of its models.
    """
    table = accuracy_table((one, *taught), _exchange)
    members = [run for models in ensembles for run in models]
    together = [ensemble_accuracy(models) for models in ensembles]
    single = [float(run.metrics["test_accuracy"]) for run in members]
    seconds = mean(float(run.metrics["train_seconds"]) for run in members)
    rows = [
        (way, mean(values), min(values), max(values), len(values), 0.0, seconds)
        for way, values in ((ENSEMBLE, together), (SINGLE, single))
    ]
    more = pd.DataFrame(rows, columns=table.columns)
    return pd.concat([table, more], ignore_index=True).set_index("way")


def summarize_codistillation(table: pd.DataFrame) -> Markdown:
    """Compare a single model, codistilled models and an ensemble, for equal numbers of gradients.

    Published: codistillation beats synchronous training of one model with more workers (Anil 2018,
        arXiv 1804.03235).

    Args:
        table: Result of `codistillation_table`.
    """
    return sentences([*_way_findings(table), *_codistillation_claims(table)])


def _way_findings(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.drop(index=SINGLE).itertuples():
        spent = (
            f"{bytes_text(row.wire_bytes)} on the wire per step, "
            f"{seconds_text(row.seconds)} of training"
        )
        single = PERCENT(table["accuracy"][SINGLE])
        models = (
            f"a single model of the ensemble has {single}; the ensemble averages the predictions "
            "of all its models"
        )
        yield accuracy_finding(row, "", str(row.Index), models if row.Index == ENSEMBLE else spent)


def _codistillation_claims(table: pd.DataFrame) -> Iterator[Finding]:
    one, together = table.loc[[ONE]], table.loc[[ENSEMBLE]]
    codistilled = table.drop(index=[ONE, ENSEMBLE, SINGLE])
    ours = ", ".join(f"{row.Index} {PERCENT(row.accuracy)}" for row in codistilled.itertuples())
    yield published(
        "Codistilled models are more accurate than one model trained on as many gradients, "
        "beyond the spread of the seeds",
        "Anil 2018",
        is_better(codistilled, one),
        f"{ours}; one model {PERCENT(one['accuracy'].iloc[0])}",
    )
    worse = bool(together["accuracy_high"].iloc[0] < codistilled["accuracy_low"].min())
    verdict = (
        "better" if is_better(together, codistilled) else "equal, within the spread of the seeds"
    )
    verdict = "worse" if worse else verdict
    yield Finding(
        "Accuracy of an ensemble trained on as many gradients, compared with that of codistilled "
        f"models: **{verdict}**"
    )


def _exchange(run: Run) -> dict[str, str]:
    exchange = run.experiment["strategy"].get("exchange")
    return {"way": f"codistilled by {exchange}" if exchange else ONE}
