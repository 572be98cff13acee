"""Replicas with weights of their own: synchronization periods, gossip, and codistillation."""

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
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, published, sentences
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
from labkit.records.analysis.ensemble import ensemble_accuracy
from labkit.records.analysis.losses import epoch_results, loss_curve
from labkit.records.compressors import called, compressor_of
from labkit.records.run import Run
from labkit.records.verdict import arrivals
from labkit.strategies import Gossip

EACH_STEP, MEAN, ELASTIC = "each step", "the mean", "springs to a centre"
DELAYED, IMMEDIATE = "asynchronous, delayed Nesterov", "asynchronous, Nesterov at once"
NEARLY = 0.98  # of the final accuracy with delayed momentum
SHORT = range(8, 33)  # periods in steps that cost nothing, as published

DISTANCE = "consensus_distance"
TOLERANCE = 1.02  # ratio below which two distances count as equal
PUBLISHED_SPEED = 4.0  # ratio of epochs, synchronous to asynchronous
COMPLETE, FREE = "all together", ", asynchronous"

ONE, ENSEMBLE, SINGLE = "one model", "an ensemble", "a model alone"


def period_cost(runs: Iterable[Run]) -> Figure:
    """Draw test accuracy over the synchronization period: a line a rule, a band of seeds.

    Args:
        runs: of strategies with a period; synchronous ones, which have none, stand at 1.
    """
    shown = entries(runs)
    table = period_table([entry.run for entry in shown])
    looks = lines(dict.fromkeys(table["rule"]))
    panel = Panel(
        title="What rare meetings cost\nmean over seeds; band: their spread",
        x="steps between meetings",
        y="test accuracy",
        traces=line_with_band(table, "period", "accuracy", looks, by="rule", marks=True),
        x_axis={"type": "log", "tickvals": sorted(set(table["period"]))},
        y_axis={"tickformat": ".0%"},
    )
    words = [f"{row.way}: {row.accuracy:.1%}" for row in table.itertuples()]
    title = f"Accuracy by period · {clock_and_network(shown)}"
    return sheet([[panel]], looks.values(), title, overload(shown), words, plot=300)


def period_reading(runs: Sequence[Run]) -> Markdown:
    """Say what each period costs in accuracy, and saves in bytes and time.

    Published: periods of 8 to 32 steps cost nothing beyond the seeds, longer ones do (Lin 2020,
    arXiv 1808.07217). At long periods an outer Nesterov is better than the plain mean (Douillard
    2023, arXiv 2311.08105), also with pseudo-gradients of 4 bits (Douillard 2025, arXiv
    2501.18512). Elastic averaging tolerates long periods (Zhang 2015, arXiv 1412.6651).
    Asynchronous workers need more steps without delayed Nesterov momentum (Liu 2024, arXiv
    2401.09135).

    A run is within the seeds of another if their ranges meet, and beyond them if all seeds are on
    one side. Periods longer than the training are not judged.
    """
    table = period_table(runs)
    reached = table[table["period"] <= table["steps"]]
    findings = [*_periods(table), *_averaging(reached), *_elastic(reached)]
    return sentences([*findings, *_compressed(reached), *_delayed(reached)])


def period_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row a run: way, rule, codec, period, steps, run, and the columns of accuracies."""
    return accuracy_table(runs, _rule).sort_values(["rule", "period"], kind="stable")


def _rule(run: Run) -> dict[str, Any]:
    """Return how replicas synchronize, after how many steps, and with which codec."""
    strategy, epochs = run.experiment["strategy"], run.metrics.get("epochs") or [{}]
    rule, codec, period = EACH_STEP, "", strategy.get("period", 1)
    if "period" in strategy:
        known = {None: MEAN, "sgd": "outer SGD", "nesterov": "outer Nesterov"}
        momentum = DELAYED if strategy.get("delayed", 1) > 1 else IMMEDIATE
        others = {"ElasticAveraging": ELASTIC, "AsynchronousDiLoCo": momentum}
        codec = _codec(compressor_of(run))
        rule = others.get(strategy["name"]) or known[strategy.get("outer")]
        rule += f", {codec}" if codec else ""
        period = int((epochs[0].get("step") if period == "epoch" else period) or 1)
    way = rule if rule == EACH_STEP else f"{rule}, every {period}"
    steps = epochs[-1].get("step", math.inf)
    names = {"way": way, "rule": rule, "codec": codec}
    return names | {"period": period, "steps": steps, "run": run}


def _codec(compressor: Mapping[str, JSON] | None) -> str:
    """Return `in 4 bits`, or the name of the compressor."""
    if compressor is None:
        return ""
    inner = compressor.get("inner")
    levels = (inner if isinstance(inner, Mapping) else compressor).get("levels")
    if isinstance(levels, int):
        # Levels lie on both sides of zero, and zero is one more.
        return f"in {(2 * levels).bit_length()} bits"
    return f"by {called(dict(compressor))}"


def _periods(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        spent = f"{bytes_text(row.wire_bytes)} on the wire a step, {seconds_text(row.seconds)} long"
        never = f"training has {row.steps:.0f} steps: they met once, at its end"
        details = (spent, never) if row.period > row.steps else (spent,)
        yield accuracy_finding(row, "", row.way, *details)


def _claim(claim: str, source: str, holds: bool, *tables: pd.DataFrame) -> Finding:
    return published(claim, source, holds, "; ".join(map(list_accuracies, tables)))


def _averaging(table: pd.DataFrame) -> Iterator[Finding]:
    """Judge short and long periods of averaging, and the outer optimizer at the longest one."""
    each, means = (table[table["rule"] == rule] for rule in (EACH_STEP, MEAN))
    short, later = means[means["period"].isin(SHORT)], means[means["period"] > max(SHORT)]
    if len(each) and len(short):
        claim = "Periods of 8 to 32 steps cost nothing beyond the seeds, whose ranges meet"
        yield _claim(claim, "Lin 2020", is_near(short, each), short, each)
    if len(each) and len(later):
        claim = "Longer ones do, beyond the seeds"
        yield _claim(claim, "Lin 2020", is_better(each, later), later, each)
    outer = table[table["rule"] == "outer Nesterov"]
    yield from _at_the_longest("an outer Nesterov is", "Douillard 2023", outer, means)


def _elastic(table: pd.DataFrame) -> Iterator[Finding]:
    """Judge whether elastic averaging tolerates long periods."""
    elastic = table[table["rule"] == ELASTIC].sort_values("period")
    if elastic["period"].nunique() > 1:
        claim = "Springs stand long periods, within the seeds"
        yield _claim(claim, "Zhang 2015", is_near(elastic[-1:], elastic[:1]), elastic)
    means = table[table["rule"] == MEAN]
    yield from _at_the_longest("springs are", "Zhang 2015", elastic, means)


def _at_the_longest(
    rule: str, source: str, ours: pd.DataFrame, theirs: pd.DataFrame
) -> Iterator[Finding]:
    """Judge a rule against the mean at the longest period that both have, unless it is short."""
    longest = max({*ours["period"]} & {*theirs["period"]}, default=None)
    ours, theirs = ours[ours["period"] == longest], theirs[theirs["period"] == longest]
    if len(ours) and not ours["period"].isin(SHORT).any():
        claim = f"At the longest period {rule} better than the mean, beyond the seeds"
        yield _claim(claim, source, is_better(ours, theirs), ours, theirs)


def _compressed(table: pd.DataFrame) -> Iterator[Finding]:
    """Judge compressed outer gradients against those of full precision at the same period."""
    coded = table[table["codec"] != ""]
    for (codec, period), ours in coded.groupby(["codec", "period"], sort=False):
        rule = ours["rule"].iloc[0].removesuffix(f", {codec}")
        full = table[(table["rule"] == rule) & (table["period"] == period)]
        if len(full):
            claim = f"Outer gradients {codec} lie within the seeds of full precision"
            yield _claim(claim, "Douillard 2025", is_near(ours, full), ours, full)


def _delayed(table: pd.DataFrame) -> Iterator[Finding]:
    """Compare steps until nearly the final accuracy of delayed momentum, period by period."""
    late, soon = (table[table["rule"] == rule].set_index("period") for rule in (DELAYED, IMMEDIATE))
    for period in sorted({*late.index} & {*soon.index}):
        target = NEARLY * float(late["accuracy"][period])
        ours, theirs = (
            [
                findings.step
                for findings in arrivals(group["run"][period], target).values()
                if findings
            ]
            for group in (late, soon)
        )
        if not ours:
            continue
        missed = len(theirs) < soon["seeds"][period]
        without = "not by all seeds without" if missed else f"{mean(theirs):.0f} without"
        yield published(
            f"Every {period} steps, asynchronous workers need more of them without delayed "
            "Nesterov, beyond the seeds",
            "Liu 2024",
            missed or min(theirs) > max(ours),
            f"nearly its end is reached after {mean(ours):.0f} steps with it, {without}",
        )


def consensus(runs: Iterable[Run]) -> Figure:
    """Draw the distance of replicas from their mean after each epoch, as root mean square.

    Args:
        runs: with weights of their own on each worker; others have no distance.
    """
    shown = entries(runs)
    traces, words = [], []
    for entry in shown:
        group = epoch_results(entry.run, loss_curve(entry.run.history))
        if DISTANCE in group:
            traces += line_over_band(group, "step", DISTANCE, entry, marks=True)
            words.append(f"{entry.label}: {group[DISTANCE].iloc[-1]:.3g} at the end")
    panel = Panel(
        title="How far apart replicas are\ndistance of their weights from the mean",
        x="step",
        y="consensus distance",
        traces=traces,
        note="" if traces else "all workers have the same weights",
        y_axis={"rangemode": "tozero"},
    )
    title = f"Consensus distance · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, overload(shown), words, plot=300)


def gossip_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row a run: topology, consensus, accuracy, and cost.

    Columns: way; spectral gap; distance of weights at the end; accuracy with its ends over the
    seeds; bytes on the wire a step; seconds of the training and of an epoch.
    """
    table = accuracy_table(runs, _topology)
    return table.assign(
        epoch_seconds=table["seconds"] / [int(r.experiment["epochs"]) for r in runs]
    )


def _topology(run: Run) -> dict[str, Any]:
    """Return the topology, its spectral gap (NaN for all workers together), and the distance."""
    fields = dict(run.experiment["strategy"])
    distance = (run.metrics.get("epochs") or [{}])[-1].get(DISTANCE, 0.0)
    if fields.pop("name") != "Gossip":
        return {"way": COMPLETE, "gap": math.nan, "distance": distance}
    strategy = Gossip.model_validate(fields)
    topology = strategy.topology if isinstance(strategy.topology, str) else "a matrix"
    way = topology.replace("_", " ") + (FREE if strategy.asynchronous else "")
    gap = strategy.spectral_gap(int(run.experiment["workers"]))
    return {"way": way, "gap": gap, "distance": distance}


def consensus_reading(runs: Sequence[Run]) -> Markdown:
    """Say how near each topology keeps replicas, and its cost in accuracy and time.

    Published: neighbours alone learn what all together do, and on a slow network in less time
    (Lian 2017, arXiv 1705.09056); a graph of a larger gap keeps replicas nearer (Assran 2019).
    """
    table = gossip_table(runs)
    return sentences([*_topologies(table), *_gossip_claims(table)])


def slow_worker_reading(runs: Sequence[Run]) -> Markdown:
    """Say how long an epoch lasts with one slow worker, for each topology.

    Published: asynchronous gossip takes it at least 4 times as fast as an allreduce with one worker
    10 times slower (Lian 2018, arXiv 1710.06952).
    """
    table = gossip_table(runs)
    findings = [
        Finding(
            "",
            row.way,
            row.epoch_seconds,
            text=seconds_text,
            details=(f"{row.accuracy:.1%} right",),
        )
        for row in table.itertuples()
    ]
    free = table[table["way"].str.endswith(FREE)]["epoch_seconds"]
    together = table[table["way"] == COMPLETE]["epoch_seconds"]
    if len(free) and len(together):
        factor = float(together.min() / free.max())
        claim = "An asynchronous epoch is at least 4 times as fast"
        holds = factor >= PUBLISHED_SPEED
        findings.append(published(claim, "Lian 2018", holds, f"{factor:.2g} times"))
    return sentences(findings)


def _topologies(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        spent = f"{seconds_text(row.seconds)} long, {bytes_text(row.wire_bytes)} on the wire a step"
        far = "all have the same weights"
        if not math.isnan(row.gap):
            far = f"spectral gap {row.gap:.3g}, replicas are {row.distance:.3g} apart at the end"
        yield accuracy_finding(row, "", row.way, spent, far)


def _gossip_claims(table: pd.DataFrame) -> Iterator[Finding]:
    graphs = table[table["gap"].notna()].sort_values("gap")
    together = table[table["gap"].isna()]
    if len(graphs) and len(together):
        accuracies = "; ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())
        claim = "Neighbours alone learn what all together do"
        yield published(claim, "Lian 2017", is_near(graphs, together), accuracies)
        sooner = bool(graphs["seconds"].max() < together["seconds"].min())
        times = "; ".join(f"{row.way} {seconds_text(row.seconds)}" for row in table.itertuples())
        yield published("And in less time on this network", "Lian 2017", sooner, times)
    if len(graphs) > 1:
        near = all(b <= a * TOLERANCE for a, b in pairwise(graphs["distance"]))
        pairs = "; ".join(f"{r.way} {r.gap:.3g}, {r.distance:.3g}" for r in graphs.itertuples())
        yield published("A larger spectral gap keeps replicas nearer", "Assran 2019", near, pairs)


def codistillation_table(
    one: Run, taught: Sequence[Run], ensembles: Sequence[Sequence[Run]]
) -> pd.DataFrame:
    """Return a row a way: accuracy with its ends, seeds, bytes on the wire a step, and seconds.

    Args:
        one: a model that all workers train synchronously.
        taught: codistilled models of as many workers.
        ensembles: of as many models trained alone, one ensemble a seed; the mean of their
            predictions counts.
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


def codistillation_reading(table: pd.DataFrame) -> Markdown:
    """Compare one model, codistilled models, and an ensemble, of as many gradients each.

    Published: a codistilled model is better than one that is trained alone, with more workers in
    step (Anil 2018, arXiv 1804.03235).

    Args:
        table: see `codistillation_table`.
    """
    return sentences([*_ways(table), *_codistillation_claims(table)])


def _ways(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.drop(index=SINGLE).itertuples():
        spent = f"{bytes_text(row.wire_bytes)} on the wire a step, {seconds_text(row.seconds)} long"
        single = PERCENT(table["accuracy"][SINGLE])
        models = f"one of its models {single}; each row is predicted by all of them"
        yield accuracy_finding(row, "", str(row.Index), models if row.Index == ENSEMBLE else spent)


def _codistillation_claims(table: pd.DataFrame) -> Iterator[Finding]:
    one, together = table.loc[[ONE]], table.loc[[ENSEMBLE]]
    taught = table.drop(index=[ONE, ENSEMBLE, SINGLE])
    ours = ", ".join(f"{row.Index} {PERCENT(row.accuracy)}" for row in taught.itertuples())
    yield published(
        "Models that learn from each other are better than one of as many gradients, beyond the "
        "seeds",
        "Anil 2018",
        is_better(taught, one),
        f"{ours}; one model {PERCENT(one['accuracy'].iloc[0])}",
    )
    worse = bool(together["accuracy_high"].iloc[0] < taught["accuracy_low"].min())
    verdict = "better" if is_better(together, taught) else "no different beyond the seeds"
    verdict = "worse" if worse else verdict
    yield Finding(
        f"An ensemble of as many gradients, beside a model that was taught: **{verdict}**"
    )


def _exchange(run: Run) -> dict[str, str]:
    exchange = run.experiment["strategy"].get("exchange")
    return {"way": f"codistilled by {exchange}" if exchange else ONE}
