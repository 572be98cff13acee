"""Replicas with weights of their own: synchronization periods, gossip, and codistillation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING

import pandas as pd

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_over_band, line_with_band
from labkit.figures.kit.sheet import Panel, busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.compressors import called, compressor_of
from labkit.records.questions.columns import spread
from labkit.records.questions.ensemble import ensemble_accuracy
from labkit.records.questions.losses import epoch_results, loss_curve
from labkit.records.run import Run
from labkit.records.verdict import arrivals
from labkit.strategies import Gossip

if TYPE_CHECKING:
    from labkit.common.content import JSON

_EACH, _MEAN = "each step", "the mean"
_SPRINGS = "springs to a centre"
_LATE, _AT_ONCE = "asynchronous, delayed Nesterov", "asynchronous, Nesterov at once"
_NEARLY = 0.98  # of what the delayed momentum has learned at the end
_SHORT = range(8, 33)  # steps between meetings that cost nothing, as published


def period_cost(runs: Iterable[Run]) -> Figure:
    """Test accuracy over the steps between meetings: a line a rule of meeting, a band of seeds.

    Args:
        runs: of strategies with a period; synchronous ones, which have none, stand at 1.
    """
    shown = entries(runs)
    table = _table([entry.run for entry in shown])
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
    return sheet([[panel]], looks.values(), title, busy(shown), words, plot=300)


def period_reading(runs: Sequence[Run]) -> Markdown:
    """What each period costs in accuracy, and spares in bytes and time.

    Published: periods of 8 to 32 steps cost nothing beyond the seeds, longer ones do (Lin 2020,
    arXiv 1808.07217); at long ones an outer Nesterov is better than the plain mean (Douillard 2023,
    arXiv 2311.08105), also where pseudo-gradients are said in 4 bits (Douillard 2025, arXiv
    2501.18512); elastic averaging stands long periods (Zhang 2015, arXiv 1412.6651); asynchronous
    workers need more steps where Nesterov's momentum is not delayed (Liu 2024, arXiv 2401.09135).

    Within the seeds are those whose range over the seeds meets that of what they are held against,
    beyond them those of which all seeds are on one side. Periods that training never had are held
    against nothing.
    """
    table = _table(runs)
    had = table[table["period"] <= table["steps"]]
    return sentences(
        [*_period_findings(table), *_means(had), *_springs(had), *_few_bits(had), *_delayed(had)]
    )


def _period_findings(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        band, percent = (row.accuracy_low, row.accuracy_high), "{:.1%}".format
        spent = f"{bytes_text(row.nbytes)} on the wire a step, {seconds_text(row.seconds)} long"
        never = f"training has {row.steps:.0f} steps: they met once, at its end"
        said = (spent, never) if row.period > row.steps else (spent,)
        yield Finding("", row.way, row.accuracy, band, row.seeds, percent, said=said)


def _means(table: pd.DataFrame) -> Iterator[Finding]:
    each, means = (table[table["rule"] == rule] for rule in (_EACH, _MEAN))
    short = means[means["period"].isin(_SHORT)]
    later = means[means["period"] > max(_SHORT)]
    if len(each) and len(short):
        what = "Periods of 8 to 32 steps cost nothing beyond the seeds, whose ranges meet"
        yield _shape(what, "Lin 2020", _near(short, each), short, each)
    if len(each) and len(later):
        what = "Longer ones do, beyond the seeds"
        yield _shape(what, "Lin 2020", _better(each, later), later, each)
    outer = table[table["rule"] == "outer Nesterov"]
    ours, plain = _at_the_longest(outer, means)
    if len(ours) and not ours["period"].isin(_SHORT).any():
        what = "At the longest period an outer Nesterov is better than the mean, beyond the seeds"
        yield _shape(what, "Douillard 2023", _better(ours, plain), ours, plain)


def _springs(table: pd.DataFrame) -> Iterator[Finding]:
    springs = table[table["rule"] == _SPRINGS].sort_values("period")
    if springs["period"].nunique() > 1:
        what, came = (
            "Springs stand long periods, within the seeds",
            _near(springs[-1:], springs[:1]),
        )
        yield _shape(what, "Zhang 2015", came, springs)
    ours, plain = _at_the_longest(springs, table[table["rule"] == _MEAN])
    if len(ours) and not ours["period"].isin(_SHORT).any():
        what = "At the longest period springs are better than the mean, beyond the seeds"
        yield _shape(what, "Zhang 2015", _better(ours, plain), ours, plain)


def _few_bits(table: pd.DataFrame) -> Iterator[Finding]:
    for (said, period), ours in table[table["said"] != ""].groupby(["said", "period"], sort=False):
        whole = ours["rule"].iloc[0].removesuffix(f", {said}")
        full = table[(table["rule"] == whole) & (table["period"] == period)]
        if len(full):
            what = f"Outer gradients {said} lie within the seeds of full precision"
            yield _shape(what, "Douillard 2025", _near(ours, full), ours, full)


def _at_the_longest(ours: pd.DataFrame, theirs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both at the longest period that both have; without rows, where they have none."""
    longest = max({*ours["period"]} & {*theirs["period"]}, default=None)
    return ours[ours["period"] == longest], theirs[theirs["period"] == longest]


def _near(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Whether the range of each of ours reaches theirs from below, or lies higher."""
    return bool((ours["accuracy_high"] >= theirs["accuracy_low"].min()).all())


def _better(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    """Whether all seeds of ours are above all of theirs."""
    return bool(ours["accuracy_low"].min() > theirs["accuracy_high"].max())


def _shape(what: str, source: str, came: bool, *tables: pd.DataFrame) -> Finding:
    """Whether what was published came, and the rows that say so."""
    said = "; ".join(map(_listed, tables))
    return Finding(f"**{what}** ({source}): {it_came(came)}", said=(said,))


def _delayed(table: pd.DataFrame) -> Iterator[Finding]:
    """Steps to what delayed momentum nearly ends at, where both are known of a period."""
    late, at_once = (table[table["rule"] == rule].set_index("period") for rule in (_LATE, _AT_ONCE))
    for period in sorted({*late.index} & {*at_once.index}):
        target = _NEARLY * float(late["accuracy"][period])
        ours, theirs = (_steps(own["run"][period], target) for own in (late, at_once))
        if not ours:
            continue
        never = len(theirs) < at_once["seeds"][period]
        came = never or min(theirs) > max(ours)
        yield Finding(
            f"**Every {period} steps, asynchronous workers need more of them without delayed "
            f"Nesterov, beyond the seeds** (Liu 2024): {it_came(came)}",
            said=(
                f"nearly its end is reached after {mean(ours):.0f} steps with it, "
                + ("not by all seeds without" if never else f"{mean(theirs):.0f} without"),
            ),
        )


def _steps(run: Run, target: float) -> list[int]:
    """After how many steps of each worker the seeds reached it, those that did."""
    return [found.step for found in arrivals(run, target).values() if found is not None]


def _rule(run: Run) -> tuple[str, str, int]:
    """How replicas meet, how that is said in fewer bytes (or not), and after how many steps."""
    strategy = run.experiment["strategy"]
    if "period" not in strategy:
        return _EACH, "", 1
    known = {None: _MEAN, "sgd": "outer SGD", "nesterov": "outer Nesterov"}
    free = _LATE if strategy.get("delayed", 1) > 1 else _AT_ONCE
    others = {"ElasticAveraging": _SPRINGS, "AsynchronousDiLoCo": free}
    rule = others.get(strategy["name"]) or known[strategy.get("outer")]
    period = strategy["period"]
    epochs = run.metrics.get("epochs") or [{}]
    steps = epochs[0].get("step") if period == "epoch" else period
    said = _in_bytes(compressor_of(run))
    return f"{rule}, {said}" if said else rule, said, int(steps or 1)


def _in_bytes(compressor: Mapping[str, JSON] | None) -> str:
    """`in 4 bits`, or the name of what says it."""
    if compressor is None:
        return ""
    inner = compressor.get("inner")
    levels = (inner if isinstance(inner, Mapping) else compressor).get("levels")
    # Levels on both sides of zero, and zero.
    return (
        f"in {(2 * levels).bit_length()} bits"
        if isinstance(levels, int)
        else f"by {called(dict(compressor))}"
    )


def _table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run, last: way, rule, period, accuracy, its ends, seeds, bytes a step, seconds."""
    rows = []
    for run in runs:
        (rule, said, period), accuracy = _rule(run), float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        way = rule if rule == _EACH else f"{rule}, every {period}"
        spent = float(run.metrics["wire_bytes_per_step"]), float(run.metrics["train_seconds"])
        seeds, last = run.metrics.get("repeats", 1), (run.metrics.get("epochs") or [{}])[-1]
        steps = last.get("step", math.inf)
        known = way, rule, said, period, steps, accuracy, low, high
        rows.append((*known, seeds, *spent, run))
    columns = ["way", "rule", "said", "period", "steps", "accuracy", "accuracy_low"]
    columns += ["accuracy_high", "seeds", "nbytes", "seconds", "run"]
    return pd.DataFrame(rows, columns=columns).sort_values(["rule", "period"], kind="stable")


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())


_DISTANCE = "consensus_distance"
_AS_FAR = 1.02  # distances that are told apart
_PUBLISHED = 4.0  # times as fast
_COLUMNS = "way gap distance accuracy low high seeds wire_bytes seconds epoch_seconds"
_TOGETHER, _FREE = "all together", ", asynchronous"


def consensus(runs: Iterable[Run]) -> Figure:
    """How far the weights of replicas are from their mean after each epoch, root mean square.

    Args:
        runs: whose workers have weights of their own; others have no distance to draw.
    """
    shown = entries(runs)
    traces, words = [], []
    for entry in shown:
        own = epoch_results(entry.run, loss_curve(entry.run.history))
        if _DISTANCE in own:
            traces += line_over_band(own, "step", _DISTANCE, entry, marks=True)
            words.append(f"{entry.label}: {own[_DISTANCE].iloc[-1]:.3g} at the end")
    panel = Panel(
        title="How far apart replicas are\ndistance of their weights from the mean",
        x="step",
        y="consensus distance",
        traces=traces,
        note="" if traces else "all workers have the same weights",
        y_axis={"rangemode": "tozero"},
    )
    title = f"Consensus distance · {clock_and_network(shown)}"
    return sheet([[panel]], shown, title, busy(shown), words, plot=300)


def gossip_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: who mixes with whom, how near that keeps replicas, what was learned and spent.

    Columns: way; spectral gap; distance of weights at the end; accuracy and its ends over so
    many seeds; bytes on the wire a step; seconds of the training and of an epoch of it.
    """
    rows = []
    for run in runs:
        accuracy = float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        way, gap = _topology(run)
        last = (run.metrics.get("epochs") or [{}])[-1]
        spent = float(run.metrics["wire_bytes_per_step"]), float(run.metrics["train_seconds"])
        seeds = run.metrics.get("repeats", 1)
        epoch = spent[1] / int(run.experiment["epochs"])
        rows.append((way, gap, last.get(_DISTANCE, 0.0), accuracy, low, high, seeds, *spent, epoch))
    return pd.DataFrame(rows, columns=_COLUMNS.split())


def consensus_reading(runs: Sequence[Run]) -> Markdown:
    """Which graph keeps replicas how near to each other, and what it costs in accuracy and time.

    Published: neighbours alone learn what all together do, and on a slow network in less time
    (Lian 2017, arXiv 1705.09056); a graph of a larger gap keeps replicas nearer (Assran 2019).
    """
    table = gossip_table(runs)
    return sentences([*_graph_findings(table), *_published(table)])


def slow_worker_reading(runs: Sequence[Run]) -> Markdown:
    """How long an epoch lasts where one worker is slow, by who waits for whom.

    Published: asynchronous gossip takes it at least 4 times as fast as an allreduce with one worker
    10 times slower (Lian 2018, arXiv 1710.06952).
    """
    table = gossip_table(runs)
    told = [
        Finding(
            "", row.way, row.epoch_seconds, text=seconds_text, said=(f"{row.accuracy:.1%} right",)
        )
        for row in table.itertuples()
    ]
    alone = table[table["way"].str.endswith(_FREE)]["epoch_seconds"]
    together = table[table["way"] == _TOGETHER]["epoch_seconds"]
    if len(alone) and len(together):
        factor = float(together.min() / alone.max())
        told.append(
            Finding(
                "**An asynchronous epoch is at least 4 times as fast** (Lian 2018): "
                f"{it_came(factor >= _PUBLISHED)}",
                said=(f"{factor:.2g} times",),
            )
        )
    return sentences(told)


def _graph_findings(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        band, percent = (row.low, row.high), "{:.1%}".format
        spent = f"{seconds_text(row.seconds)} long, {bytes_text(row.wire_bytes)} on the wire a step"
        far = "all have the same weights"
        if row.gap == row.gap:
            far = f"spectral gap {row.gap:.3g}, replicas are {row.distance:.3g} apart at the end"
        yield Finding("", row.way, row.accuracy, band, row.seeds, percent, said=(spent, far))


def _published(table: pd.DataFrame) -> Iterator[Finding]:
    graphs = table[table["gap"].notna()].sort_values("gap")
    together = table[table["gap"].isna()]
    if len(graphs) and len(together):
        learned = bool((graphs["high"] >= together["low"].min()).all())
        yield Finding(
            f"**Neighbours alone learn what all together do** (Lian 2017): {it_came(learned)}",
            said=("; ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples()),),
        )
        sooner = bool(graphs["seconds"].max() < together["seconds"].min())
        yield Finding(
            f"**And in less time on this network** (Lian 2017): {it_came(sooner)}",
            said=("; ".join(f"{r.way} {seconds_text(r.seconds)}" for r in table.itertuples()),),
        )
    if len(graphs) > 1:
        near = all(b <= a * _AS_FAR for a, b in pairwise(graphs["distance"]))
        yield Finding(
            f"**A larger spectral gap keeps replicas nearer** (Assran 2019): {it_came(near)}",
            said=(
                "; ".join(f"{r.way} {r.gap:.3g}, {r.distance:.3g}" for r in graphs.itertuples()),
            ),
        )


def _topology(run: Run) -> tuple[str, float]:
    """Who mixes with whom, and the spectral gap of that; not a number where all meet."""
    fields = dict(run.experiment["strategy"])
    if fields.pop("name") != "Gossip":
        return _TOGETHER, float("nan")
    strategy = Gossip.model_validate(fields)
    topology = strategy.topology if isinstance(strategy.topology, str) else "a matrix"
    way = topology.replace("_", " ") + (_FREE if strategy.asynchronous else "")
    return way, strategy.spectral_gap(int(run.experiment["workers"]))


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
    rows = {}
    for run in (one, *taught):
        accuracy = float(run.metrics["test_accuracy"])
        ends = spread(run, "test_accuracy") or (accuracy, accuracy)
        spent = float(run.metrics["wire_bytes_per_step"]), float(run.metrics["train_seconds"])
        rows[_exchange(run)] = (accuracy, *ends, int(run.metrics.get("repeats", 1)), *spent)
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
    return sentences([*_way_findings(table), *_concluded(table)])


def _way_findings(table: pd.DataFrame) -> Iterator[Finding]:
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


def _exchange(run: Run) -> str:
    exchange = run.experiment["strategy"].get("exchange")
    return f"codistilled by {exchange}" if exchange else _ONE
