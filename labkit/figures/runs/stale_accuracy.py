"""Accuracy with stale gradients: staleness corrections, published results, and time to a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from labkit.common.units import seconds_text
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

CHANCE = 2.0  # Accuracies close to the accuracy of a random guess count as chance.
SYNCHRONOUS, ASYNCHRONOUS = "synchronous", "asynchronous"
OLD = 10  # A gradient counts as old if its staleness is at least this number of updates.


def staleness_cost(runs: Iterable[Run]) -> Figure:
    """Draw test accuracy over mean staleness, with one line per staleness correction."""
    shown = entries(runs)
    table = stale_table([entry.run for entry in shown])
    looks = lines(table["staleness_correction"])
    panel = Panel(
        title="Accuracy by staleness\nmean over seeds; band: range over seeds",
        x="mean staleness (updates since the weights were fetched)",
        y="test accuracy",
        traces=line_with_band(
            table, "staleness", "accuracy", looks, by="staleness_correction", marks=True
        ),
        y_axis={"tickformat": ".0%", "rangemode": "tozero"},
    )
    words = [
        f"{row.staleness_correction}, staleness {row.staleness:.3g}: {row.accuracy:.1%}"
        for row in table.itertuples()
    ]
    title = f"Accuracy by staleness · {clock_and_network(shown)}"
    return sheet([[panel]], looks.values(), title, overload(shown), words, plot=300)


def summarize_staleness_cost(runs: Sequence[Run], classes: int = 10) -> Markdown:
    """Summarize whether training with stale gradients needs a correction, and which one helps.

    Published result: with 30 learners, 15- and 30-softsync stay near the accuracy of random
    guesses. The published result on random guesses holds for the learning rate α₀. At the rate
    α₀/τ, where τ is the staleness, 15- and 30-softsync reach the accuracy of synchronous training
    (Zhang 2016, arXiv 1511.05950). The summary confirms the claim on the rate α₀/τ by a comparison
    of seeds. The best seed of each corrected run must reach the worst synchronous seed.

    Args:
        runs: Softsync runs, and synchronous runs as the reference.
        classes: Number of classes of the data; a random guess has an accuracy of 1/classes.
    """
    table, guess = stale_table(runs), 1 / classes
    synchronous = table[table["staleness_correction"] == SYNCHRONOUS]
    if synchronous.empty:
        return sentences(
            [Finding("The claims are not judged: there is no synchronous run as a reference")]
        )
    ages = [
        accuracy_finding(row, "", row.way, f"mean staleness {row.staleness:.3g} updates")
        for row in table.itertuples()
    ]
    best = synchronous.loc[synchronous["accuracy_low"].idxmax()]
    if best["accuracy_low"] < CHANCE * guess:
        where = "" if best["accuracy"] < CHANCE * guess else " for some seeds"
        unjudged = Finding(
            "The claims are not judged: synchronous training itself is hardly better than a random "
            f"guess{where}",
            details=(f"try a learning rate below {runs[0].experiment['learning_rate']:g}",),
        )
        return sentences([*ages, unjudged])
    return sentences([*ages, *_correction_claims(table, best, guess)])


def _correction_claims(table: pd.DataFrame, best: pd.Series, guess: float) -> Iterator[Finding]:
    old = table[table["staleness"] >= OLD]
    plain = old[old["staleness_correction"] == PLAIN]
    if not plain.empty:
        claim = (
            "With stale gradients at the uncorrected learning rate, accuracy stays near a random "
            "guess"
        )
        holds = bool((plain["accuracy"] < CHANCE * guess).all())
        chance = f"a random guess has {guess:.0%}"
        yield published(claim, "Zhang 2016", holds, list_accuracies(plain), chance)
    corrected = old[old["staleness_correction"] == correction_text("per_gradient")]
    if not corrected.empty:
        yield published(
            "At the learning rate α₀/τ (τ: staleness), stale gradients reach synchronous accuracy",
            "Zhang 2016",
            bool((corrected["accuracy_high"] >= best["accuracy_low"]).all()),
            list_accuracies(corrected),
            f"synchronous training reaches {best['accuracy']:.1%}, {best['accuracy_low']:.1%} "
            "in its worst seed",
        )


def stale_table(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row per run: label (`way`), staleness correction, mean staleness, accuracy."""
    return accuracy_table(runs, _correction).sort_values("staleness", kind="stable")


def _correction(run: Run) -> dict[str, Any]:
    strategy, way = run.experiment["strategy"], way_of(run)
    # Softsync runs with the same correction form one line. Every run without softsync is a point
    # with its own label.
    remedy = correction_text(strategy.get("staleness_correction")) if strategy.get("n") else way
    return {
        "way": way,
        "staleness_correction": remedy,
        "staleness": float(staleness_of(run).mean()),
    }


def time_to_target(runs: Sequence[Run], target: float) -> pd.DataFrame:
    """Return one row per run, with the time, samples and bytes to reach the target accuracy.

    Args:
        runs: Runs with any training strategies.
        target: Target accuracy on the validation data. The table contains the seconds, samples and
            MiB until a run reaches the target.
    """
    table = to_target({str(number): run for number, run in enumerate(runs)}, target)
    table.insert(0, "way", [way_of(run) for run in runs])
    table.insert(1, "slow", [bool(run.experiment.get("stragglers")) for run in runs])
    table["MiB"] = table["bytes"] / 2**20
    columns = ["way", "slow", "seeds", "reached", "seconds", "seconds_low", "seconds_high"]
    return table[[*columns, "samples", "MiB"]].set_index("way")


def summarize_time_to_target(runs: Sequence[Run], target: float) -> Markdown:
    """Name the strategy that first reaches the target accuracy, with and without a slow worker.

    Published claim (Ho 2013): with one slow worker, asynchronous training reaches a given loss
    first. In the claim of Ho (2013), stale synchronous training is second, and synchronous training
    last. The claim of Ho (2013) orders the mean times of three training methods. The summary
    confirms the claim if the time of stale synchronous training is between the others. The summary
    states whether the times of the strategies overlap in their ranges over seeds.
    """
    table = time_to_target(runs, target).reset_index()
    findings: list[Finding] = []
    first: list[str] = []
    for slow, group in table.groupby("slow"):
        complete = group[group["reached"] == group["seeds"]].sort_values("seconds")
        where = "With one slow worker" if slow else "With equal workers"
        for row in complete.itertuples():
            band = row.seconds_low, row.seconds_high
            findings.append(Finding(where, row.way, row.seconds, band, row.seeds, seconds_text))
        if missing := [row.way for row in group.itertuples() if row.reached < row.seeds]:
            ways = ", ".join(dict.fromkeys(missing))
            findings.append(
                Finding(f"{where}, some seeds did not reach the accuracy {target:.0%}: {ways}")
            )
        if slow:
            findings += _stale_synchronous(group)
        if len(complete):
            first.append(f"{where.lower()} **{complete['way'].iloc[0]}**")
    if first:
        findings.append(
            Finding(
                "First to reach the target accuracy, by mean time over seeds", details=tuple(first)
            )
        )
    return sentences(findings)


def _stale_synchronous(group: pd.DataFrame) -> Iterator[Finding]:
    """Judge whether stale synchronous training is faster than synchronous and slower than async."""
    rows = {row.way: row for row in group.itertuples()}
    bound = [way for way in rows if way.startswith("stale synchronous")]
    if not bound or not {SYNCHRONOUS, ASYNCHRONOUS} <= set(rows):
        return
    ordered = [rows[way] for way in (SYNCHRONOUS, *bound, ASYNCHRONOUS)]
    claim = (
        "Stale synchronous training takes less time to the target accuracy than synchronous, "
        "and more than asynchronous training"
    )
    if missing := [row.way for row in ordered if row.reached < row.seeds]:
        reason = f"not judged, because {', '.join(missing)} did not reach the target accuracy"
        yield Finding(f"**{claim}** (Ho 2013)", details=(reason,))
        return
    slowest, *between, quickest = ordered
    holds = all(quickest.seconds <= row.seconds <= slowest.seconds for row in between)
    is_disjoint = all(
        quickest.seconds_high < row.seconds_low and row.seconds_high < slowest.seconds_low
        for row in between
    )
    times = [f"{seconds_text(row.seconds)} with {row.way}" for row in ordered]
    overlap = [] if is_disjoint or not holds else ["the ranges over seeds overlap"]
    yield published(claim, "Ho 2013", holds, *times, *overlap)


def softsync_published(runs: Sequence[Run]) -> pd.DataFrame:
    """Return one row per softsync run: measured and published values of staleness and test error.

    The column `staleness` is the mean staleness in updates. For n-softsync, the paper states a mean
    staleness of n. Each row is a run of n-softsync with its own n. The column `later than 2n` is
    the share of gradients with a staleness above 2n. The column `error` is the mean test error over
    seeds. The column `of seeds` is the range of the test error over seeds. The column `of` names
    the published experiment. The column `source` names the paper, and a letter that marks the type
    of source.
    """
    table = stale_table(runs).set_index("way")
    rows = {}
    for run in runs:
        strategy, way = run.experiment["strategy"], way_of(run)
        if strategy["name"] != "SoftSync":
            continue
        splits, row = strategy["n"], table.loc[way]
        matches = (
            result
            for result in SOFTSYNC
            if result.remedy == strategy["staleness_correction"]
            and splits in (result.splits or (splits,))
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


def summarize_batch(runs: Sequence[Run]) -> Markdown:
    """Summarize whether smaller batches make up for staleness, at learning rates α₀/mean staleness.

    Published claim (Gupta 2015, arXiv 1509.04210): at learning rates α₀ / staleness, the mini-batch
    size of a learner determines the accuracy. With more learners, gradients are staler, so the
    mini-batch has to shrink. The summary confirms the claim of Gupta (2015) if the ranges of
    accuracy over seeds do not overlap.

    Args:
        runs: Softsync runs with several batch sizes and several n, the staleness in n-softsync.
    """
    table = _settings_table(runs, batch="batch_size").sort_values(["batch", "n"])
    findings = [
        accuracy_finding(row, f"Batch {row.batch}, staleness {row.n}") for row in table.itertuples()
    ]
    small, large = table["batch"].min(), table["batch"].max()
    young, old = table["n"].min(), table["n"].max()
    if small < large and young < old:
        cells = table.set_index(["batch", "n"])
        corrected, plain = cells.loc[[(small, old)]], cells.loc[[(large, young)]]
        # Smaller batches also mean more updates. The finding therefore also states the accuracy of
        # small batches at the least staleness.
        findings.append(
            published(
                "Smaller batches compensate for staleness",
                "Gupta 2015",
                is_better(corrected, plain),
                f"{cells.accuracy[small, old]:.1%} with batch {small} and staleness {old}, "
                f"{cells.accuracy[large, young]:.1%} with batch {large} and staleness {young}; "
                f"{cells.accuracy[small, young]:.1%} with batch {small} and staleness {young}",
            )
        )
    return sentences(findings)


def summarize_rate(runs: Sequence[Run]) -> Markdown:
    """Summarize at which learning rates stale gradients give the same accuracy as fresh gradients.

    Args:
        runs: Softsync runs without a staleness correction, with several learning rates and several
            values of n.
    """
    table = _settings_table(runs, rate="learning_rate").sort_values("n", kind="stable")
    findings, equal_rates = [], []
    for rate, group in table.groupby("rate"):
        young, old = group[:1], group[-1:]
        # With a single run at a learning rate, the first table row is also the last.
        ends = group.iloc[[0, -1] if len(group) > 1 else [0]]
        for row in ends.itertuples():
            what = f"At learning rate {rate:g}, staleness {row.n}"
            findings.append(accuracy_finding(row, what))
        equal_rates += [f"{rate:g}"] if len(group) > 1 and not is_better(young, old) else []
    where = (
        f"at learning rate {', '.join(equal_rates)}"
        if equal_rates
        else "at no tested learning rate"
    )
    claim = Finding(
        "**Training with stale gradients is as accurate as with fresh ones, within the spread of "
        "the seeds**",
        details=(where,),
    )
    return sentences([*findings, claim])


def summarize_downpour(runs: Sequence[Run]) -> Markdown:
    """Summarize whether Adagrad lets Downpour SGD exchange less often than plain SGD does.

    The summary judges each optimizer at one learning rate. The judged rate is the best one when
    workers exchange most often. The summary also names the best learning rate when workers exchange
    least often. Published claim (Dean 2012): Downpour SGD with Adagrad is the fastest method with
    200 replicas, and is stable. The summary confirms the claim of Dean (2012) if the ranges of
    accuracy over seeds do not overlap.

    Args:
        runs: Downpour runs with Adagrad and with plain SGD, at several learning rates and several
            exchange periods.
    """
    table = _settings_table(runs, rate="learning_rate")
    table = table.sort_values(["optimizer", "fetch_every", "rate"])
    findings = [
        accuracy_finding(
            row,
            (
                f"{row.optimizer} at learning rate {row.rate:g}, exchange every "
                f"{row.fetch_every} batches"
            ),
        )
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
            f"{optimizer} at learning rate {rate:g}: accuracy {cells[often, rate]:.1%} with an "
            f"exchange every {often} batches, {cells[rarely, rate]:.1%} every {rarely} batches; "
            f"at learning rate {best:g}: {cells[rarely, best]:.1%} every {rarely} batches"
        )
    if often < rarely and {"adagrad", "sgd"} <= set(rare):
        claim = "Adagrad is more accurate than plain SGD with rare exchanges"
        yield published(claim, "Dean 2012", is_better(rare["adagrad"], rare["sgd"]), *texts)


def _settings_table(runs: Sequence[Run], **columns: str) -> pd.DataFrame:
    """Return the accuracy table with extra columns for the settings of strategy and experiment."""
    return accuracy_table(
        runs,
        lambda run: (
            {**run.experiment["strategy"]}
            | {column: run.experiment[field] for column, field in columns.items()}
        ),
    )
