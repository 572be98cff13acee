"""Accuracy under stale gradients: corrections, published results, and time to a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from labkit.common.units import seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, published, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import overload, sheet
from labkit.figures.runs.accuracy import (
    accuracy_finding,
    accuracy_table,
    is_better,
    list_accuracies,
)
from labkit.figures.runs.staleness import PLAIN, correction_text, staleness_of, way_of
from labkit.records.analysis.spending import to_target
from labkit.records.run import Run
from labkit.simulate import SOFTSYNC, SOFTSYNC_LATER

CHANCE = 2.0  # times the accuracy of a guess; less is near chance
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
OLD = 10  # updates; gradients of so many are old


def staleness_cost(runs: Iterable[Run]) -> Figure:
    """Draw test accuracy over mean staleness: a line a correction, in a band of seeds."""
    shown = entries(runs)
    table = stale_table([entry.run for entry in shown])
    looks = lines(table["remedy"])
    panel = Panel(
        title="What staleness costs\nmean over seeds; band: their spread",
        x="updates since the weights that a gradient is of, mean",
        y="test accuracy",
        traces=line_with_band(table, "staleness", "accuracy", looks, by="remedy", marks=True),
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    words = [
        f"{row.remedy}, {row.staleness:.3g} updates old: {row.accuracy:.1%}"
        for row in table.itertuples()
    ]
    title = f"Accuracy by staleness · {clock_and_network(shown)}"
    return sheet([[panel]], looks.values(), title, overload(shown), words, plot=300)


def staleness_cost_reading(runs: Sequence[Run], classes: int = 10) -> Markdown:
    """Say whether stale gradients learn at the plain rate, and which correction helps.

    Published: 15- and 30-softsync of 30 learners stay near chance at α₀, and reach what synchronous
    training reaches at α₀/τ (Zhang 2016, arXiv 1511.05950). The claim holds if no best seed of
    theirs is below the worst seed of synchronous training, and each of its seeds has learned.

    Args:
        runs: synchronous ones as the reference, and softsync ones.
        classes: of the data: one guess in so many is right.
    """
    table, guess = stale_table(runs), 1 / classes
    synchronous = table[table["remedy"] == SYNCHRONOUS]
    if synchronous.empty:
        return sentences([Finding("No run is synchronous, so none can be judged by it")])
    ages = [
        accuracy_finding(
            row, "", row.way, f"gradients are {row.staleness:.3g} updates old on average"
        )
        for row in table.itertuples()
    ]
    best = synchronous.loc[synchronous["accuracy_low"].idxmax()]
    if best["accuracy_low"] < CHANCE * guess:
        where = "" if best["accuracy"] < CHANCE * guess else " with some seeds"
        nothing = Finding(
            f"Synchronous training itself stays near chance{where}, so none can be judged by it",
            details=(f"try a learning rate below {runs[0].experiment['learning_rate']:g}",),
        )
        return sentences([*ages, nothing])
    return sentences([*ages, *_correction_claims(table, best, guess)])


def _correction_claims(table: pd.DataFrame, best: pd.Series, guess: float) -> Iterator[Finding]:
    old = table[table["staleness"] >= OLD]
    plain = old[old["remedy"] == PLAIN]
    if not plain.empty:
        claim = "Old gradients at the plain rate stay near chance"
        holds = bool((plain["accuracy"] < CHANCE * guess).all())
        chance = f"a guess is right in {guess:.0%}"
        yield published(claim, "Zhang 2016", holds, list_accuracies(plain), chance)
    corrected = old[old["remedy"] == correction_text("per_gradient")]
    if not corrected.empty:
        yield published(
            "At α₀/τ they learn what synchronous ones do",
            "Zhang 2016",
            bool((corrected["accuracy_high"] >= best["accuracy_low"]).all()),
            list_accuracies(corrected),
            f"synchronous training reaches {best['accuracy']:.1%}, {best['accuracy_low']:.1%} "
            "in its worst seed",
        )


def stale_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row a run: way, correction, mean staleness, and the columns of accuracies."""
    return accuracy_table(runs, _correction).sort_values("staleness", kind="stable")


def _correction(run: Run) -> dict[str, Any]:
    strategy, way = run.experiment["strategy"], way_of(run)
    # Softsync has a line a correction; any other strategy is a point with its own name.
    remedy = correction_text(strategy.get("remedy")) if strategy.get("splits") else way
    return {"way": way, "remedy": remedy, "staleness": float(staleness_of(run).mean())}


def time_to_target(runs: Sequence[Run], target: float) -> pd.DataFrame:
    """Return a row a run: way, whether a worker is slow, and seconds, samples, MiB to a target.

    Args:
        runs: of any strategies.
        target: accuracy on held-out rows.
    """
    table = to_target({str(number): run for number, run in enumerate(runs)}, target)
    table.insert(0, "way", [way_of(run) for run in runs])
    table.insert(1, "slow", [bool(run.experiment.get("slow")) for run in runs])
    table["MiB"] = table["bytes"] / 2**20
    columns = ["way", "slow", "seeds", "reached", "seconds", "seconds_low", "seconds_high"]
    return table[[*columns, "samples", "MiB"]].set_index("way")


def time_to_target_reading(runs: Sequence[Run], target: float) -> Markdown:
    """Say which way reaches the target first, with a slow worker and without.

    Published: with one slow worker a stale synchronous server is between one that waits for all and
    one that waits for nobody, in time to a given loss (Ho 2013). The claim holds if the means are
    in that order; overlaps of the ranges over seeds are named.
    """
    table = time_to_target(runs, target).reset_index()
    findings: list[Finding] = []
    first: list[str] = []
    for slow, group in table.groupby("slow"):
        done = group[group["reached"] == group["seeds"]].sort_values("seconds")
        where = "With one slow worker" if slow else "With equal workers"
        for row in done.itertuples():
            band = row.seconds_low, row.seconds_high
            findings.append(Finding(where, row.way, row.seconds, band, row.seeds, seconds_text))
        if missing := [row.way for row in group.itertuples() if row.reached < row.seeds]:
            ways = ", ".join(dict.fromkeys(missing))
            findings.append(Finding(f"{where} {target:.0%} was not reached in all seeds by {ways}"))
        if slow:
            findings += _stale_synchronous(group)
        if len(done):
            first.append(f"{where.lower()} **{done['way'].iloc[0]}**")
    if first:
        findings.append(Finding("First at the goal, by means over seeds", details=tuple(first)))
    return sentences(findings)


def _stale_synchronous(group: pd.DataFrame) -> Iterator[Finding]:
    """Judge whether stale synchronous servers are between the two extremes."""
    rows = {row.way: row for row in group.itertuples()}
    bound = [way for way in rows if way.startswith("stale synchronous")]
    if not bound or not {SYNCHRONOUS, ASYNCHRONOUS} <= set(rows):
        return
    ordered = [rows[way] for way in (SYNCHRONOUS, *bound, ASYNCHRONOUS)]
    claim = (
        "Stale synchronous servers are between those that wait for all and those that wait for "
        "nobody"
    )
    if missing := [row.way for row in ordered if row.reached < row.seeds]:
        reason = f"cannot be judged, as {', '.join(missing)} did not arrive"
        yield Finding(f"**{claim}** (Ho 2013)", details=(reason,))
        return
    slowest, *between, quickest = ordered
    holds = all(quickest.seconds <= row.seconds <= slowest.seconds for row in between)
    apart = all(
        quickest.seconds_high < row.seconds_low and row.seconds_high < slowest.seconds_low
        for row in between
    )
    times = [f"{seconds_text(row.seconds)} with {row.way}" for row in ordered]
    overlap = [] if apart or not holds else ["the seeds' bands overlap"]
    yield published(claim, "Ho 2013", holds, *times, *overlap)


def softsync_published(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row a softsync run: ages of gradients and test error, beside published values.

    Columns: staleness, the mean, published as n; later, the share of gradients more than 2n updates
    old; error, the mean over seeds, with its ends; of, source: what was published, where, and the
    mark of the source in `labkit.simulate.published`.
    """
    table = stale_table(runs).set_index("way")
    rows = {}
    for run in runs:
        strategy, way = run.experiment["strategy"], way_of(run)
        if strategy["name"] != "SoftSync":
            continue
        splits, row = strategy["splits"], table.loc[way]
        matches = (
            result
            for result in SOFTSYNC
            if result.remedy == strategy["remedy"] and splits in (result.splits or (splits,))
        )
        known = next(matches, None)
        rows[way] = {
            "staleness": round(row["staleness"], 2),
            "published staleness": splits,
            "later than 2n": f"{(staleness_of(run) > 2 * splits).mean():.2g}",
            "published later": f"< {SOFTSYNC_LATER:g}",
            "error": f"{1 - row['accuracy']:.1%}",
            "of seeds": f"{1 - row['accuracy_high']:.1%} to {1 - row['accuracy_low']:.1%}",
            "published error": f"{known.error:.0%}" if known else "not found",
            "of": known.what if known else "",
            "source": f"{known.source} [{known.mark}]" if known else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("way")


def batch_reading(runs: Sequence[Run]) -> Markdown:
    """Say whether smaller batches make up for staleness, at α₀ over the mean staleness.

    Published: at these rates the mini-batch of a learner is what costs accuracy, so that with more
    learners, whose gradients are older, it has to shrink (Gupta 2015, arXiv 1509.04210). The claim
    holds if the ranges over seeds are apart.

    Args:
        runs: of softsync, with several batches and several n.
    """
    table = _settings_table(runs, batch="batch_size").sort_values(["batch", "splits"])
    findings = [
        accuracy_finding(row, f"Batch {row.batch}, gradients {row.splits} updates old")
        for row in table.itertuples()
    ]
    small, large = table["batch"].min(), table["batch"].max()
    young, old = table["splits"].min(), table["splits"].max()
    if small < large and young < old:
        cells = table.set_index(["batch", "splits"])
        corrected, plain = cells.loc[[(small, old)]], cells.loc[[(large, young)]]
        # As many samples in all are more updates; their own effect stands beside the result.
        findings.append(
            published(
                "Smaller batches make up for staleness",
                "Gupta 2015",
                is_better(corrected, plain),
                f"batch {small} with gradients {old} updates old "
                f"{cells.accuracy[small, old]:.1%}, batch {large} with gradients {young} updates "
                f"old {cells.accuracy[large, young]:.1%}; batch {small} with such young ones "
                f"{cells.accuracy[small, young]:.1%}",
            )
        )
    return sentences(findings)


def rate_reading(runs: Sequence[Run]) -> Markdown:
    """Say at which learning rates old gradients learn as much as young ones, within the seeds.

    Args:
        runs: of softsync, without a correction, with several rates and several n.
    """
    table = _settings_table(runs, rate="learning_rate").sort_values("splits", kind="stable")
    findings, free = [], []
    for rate, group in table.groupby("rate"):
        young, old = group[:1], group[-1:]
        # A rate with one run has it once.
        ends = group.iloc[[0, -1] if len(group) > 1 else [0]]
        for row in ends.itertuples():
            what = f"At {rate:g}, gradients {row.splits} updates old"
            findings.append(accuracy_finding(row, what))
        free += [f"{rate:g}"] if len(group) > 1 and not is_better(young, old) else []
    where = f"at {', '.join(free)}" if free else "at none of these rates"
    claim = Finding("**Old gradients learn as much as young ones**", details=(where,))
    return sentences([*findings, claim])


def downpour_reading(runs: Sequence[Run]) -> Markdown:
    """Say whether Downpour with Adagrad tolerates rarer exchanges than with plain SGD.

    Each optimizer has the rate that is best for it with the most frequent exchanges; the best rate
    with the rarest ones is named, too. Published: Downpour SGD with Adagrad is fastest with 200
    replicas, and stable (Dean 2012). The claim holds if the ranges over seeds are apart.

    Args:
        runs: of Downpour, with both optimizers, several rates, and several batches to an exchange.
    """
    table = _settings_table(runs, rate="learning_rate")
    table = table.sort_values(["optimizer", "fetch_every", "rate"])
    findings = [
        accuracy_finding(row, f"{row.optimizer} at {row.rate:g}, every {row.fetch_every} batches")
        for row in table.itertuples()
    ]
    return sentences([*findings, *_adagrad_claim(table)])


def _adagrad_claim(table: pd.DataFrame) -> Iterator[Finding]:
    often, rarely = table["fetch_every"].min(), table["fetch_every"].max()
    rare, texts = {}, []
    for optimizer, group in table.groupby("optimizer"):
        by_rate = group.set_index(["fetch_every", "rate"])
        cells = by_rate["accuracy"]
        rate, best = cells[often].idxmax(), cells[rarely].idxmax()
        rare[optimizer] = by_rate.loc[[(rarely, rate)]]
        texts.append(
            f"{optimizer} at {rate:g} has {cells[often, rate]:.1%} every {often} and "
            f"{cells[rarely, rate]:.1%} every {rarely} batches, at {best:g} there "
            f"{cells[rarely, best]:.1%}"
        )
    if often < rarely and {"adagrad", "sgd"} <= set(rare):
        claim = "Adagrad tolerates staleness that plain SGD does not"
        yield published(claim, "Dean 2012", is_better(rare["adagrad"], rare["sgd"]), *texts)


def _settings_table(runs: Sequence[Run], **columns: str) -> pd.DataFrame:
    """Return accuracies with the fields of the strategy and these fields of the experiment."""
    return accuracy_table(
        runs,
        lambda run: (
            {**run.experiment["strategy"]}
            | {column: run.experiment[field] for column, field in columns.items()}
        ),
    )
