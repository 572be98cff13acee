"""How rarely replicas may meet: what they learn, and what they send, by the steps between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.columns import spread
from labkit.records.compressors import called, compressor_of
from labkit.records.run import Run
from labkit.records.verdict import arrivals

if TYPE_CHECKING:
    import pandas as pd

    from labkit.common.canonical_json import JSON
    from labkit.figures.kit.canvas import Figure

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
    return sentences([*_said(table), *_means(had), *_springs(had), *_few_bits(had), *_delayed(had)])


def _said(table: pd.DataFrame) -> Iterator[Finding]:
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
    import pandas as pd

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
