"""How rarely replicas may meet: what they learn, and what they send, by the steps between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.questions.columns import spread
from labkit.records.run import Run
from labkit.records.verdict import arrivals

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_EACH = "each step"
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

    Published: periods of 8 to 32 steps cost nothing beyond the seeds (Lin 2020, arXiv 1808.07217);
    at long ones an outer Nesterov is better than the plain mean (Douillard 2023, arXiv 2311.08105);
    elastic averaging stands long periods (Zhang 2015, arXiv 1412.6651); asynchronous workers need
    more steps where Nesterov's momentum is not delayed (Liu 2024, arXiv 2401.09135).
    """
    table = _table(runs)
    return sentences([*_said(table), *_published(table)])


def _said(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        band, percent = (row.accuracy_low, row.accuracy_high), "{:.1%}".format
        spent = f"{bytes_text(row.nbytes)} on the wire a step, {seconds_text(row.seconds)} long"
        yield Finding("", row.way, row.accuracy, band, row.seeds, percent, said=(spent,))


def _published(table: pd.DataFrame) -> Iterator[Finding]:
    each = table[table["rule"] == _EACH]
    means = table[table["rule"] == "the mean"]
    short = means[means["period"].isin(_SHORT)]
    if len(each) and len(short):
        came = bool((short["accuracy_high"] >= each["accuracy_low"].min()).all())
        yield Finding(
            "**Periods of 8 to 32 steps cost nothing beyond the seeds** (Lin 2020): "
            f"{it_came(came)}",
            said=(f"{_listed(short)}; {_listed(each)}",),
        )
    outer = table[table["rule"] == "outer Nesterov"]
    longest = max({*outer["period"]} & {*means["period"]}, default=None)
    if longest is not None and longest not in _SHORT:
        ours, plain = (own[own["period"] == longest] for own in (outer, means))
        came = bool(ours["accuracy_low"].min() > plain["accuracy_high"].max())  # bands apart
        yield Finding(
            "**At the longest period an outer Nesterov is better than the mean, beyond the seeds** "
            "(Douillard 2023): "
            f"{it_came(came)}",
            said=(f"{_listed(ours)}; {_listed(plain)}",),
        )

    springs = table[table["rule"] == _SPRINGS].sort_values("period")
    if springs["period"].nunique() > 1:
        came = bool(springs["accuracy_high"].iloc[-1] >= springs["accuracy_low"].iloc[0])
        yield Finding(
            "**Springs stand long periods, within the seeds** (Zhang 2015): " + it_came(came),
            said=(_listed(springs),),
        )
    yield from _delayed(table)


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


def _rule(run: Run) -> tuple[str, int]:
    """How replicas meet, and after how many steps."""
    strategy = run.experiment["strategy"]
    if "period" not in strategy:
        return _EACH, 1
    known = {None: "the mean", "sgd": "outer SGD", "nesterov": "outer Nesterov"}
    free = _LATE if strategy.get("delayed", 1) > 1 else _AT_ONCE
    others = {"ElasticAveraging": _SPRINGS, "AsynchronousDiLoCo": free}
    rule = others.get(strategy["name"]) or known[strategy.get("outer")]
    period = strategy["period"]
    steps = run.metrics.get("steps_per_epoch") if period == "epoch" else period
    return rule, int(steps or 1)


def _table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run, last: way, rule, period, accuracy, its ends, seeds, bytes a step, seconds."""
    import pandas as pd

    rows = []
    for run in runs:
        (rule, period), accuracy = _rule(run), float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        way = rule if rule == _EACH else f"{rule}, every {period}"
        spent = float(run.metrics["wire_bytes_per_step"]), float(run.metrics["train_seconds"])
        seeds = run.metrics.get("repeats", 1)
        rows.append((way, rule, period, accuracy, low, high, seeds, *spent, run))
    columns = ["way", "rule", "period", "accuracy", "accuracy_low", "accuracy_high"]
    columns += ["seeds", "nbytes", "seconds", "run"]
    return pd.DataFrame(rows, columns=columns).sort_values(["rule", "period"], kind="stable")


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())
