"""Accuracy under stale gradients: corrections, published results, and time to a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean

import pandas as pd

from labkit.common.units import seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import clock_and_network, entries, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.sheet import Panel, busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.figures.runs.staleness import PLAIN, correction_text, staleness_of, way_of
from labkit.records.questions.columns import spread
from labkit.records.questions.spending import to_target
from labkit.records.run import Run
from labkit.simulate import SOFTSYNC, SOFTSYNC_LATER

_CHANCE = 2.0  # times the accuracy of a guess is near it
_WAITS = "synchronous"


def staleness_cost(runs: Iterable[Run]) -> Figure:
    """Test accuracy over the mean staleness of gradients: a line a remedy, in a band of seeds."""
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
    return sheet([[panel]], looks.values(), title, busy(shown), words, plot=300)


def staleness_cost_reading(runs: Sequence[Run], classes: int = 10) -> Markdown:
    """Whether stale gradients at the plain rate learn nothing, and which remedy mends it.

    Published: 15- and 30-softsync of 30 learners stay near chance at α₀, and reach what synchronous
    training reaches at α₀/τ (Zhang 2016, arXiv 1511.05950). It came where none of their best seeds
    is below the worst one of synchronous training, which itself has learned something with each.

    Args:
        runs: synchronous ones, by which the others are judged, and softsync ones.
        classes: of the data: one guess in so many is right.
    """
    table, guess = stale_table(runs), 1 / classes
    waits = table[table["remedy"] == _WAITS]
    if waits.empty:
        return sentences([Finding("No run is synchronous, so none can be judged by it")])
    learned = waits.loc[waits["accuracy_low"].idxmax()]
    if learned["accuracy_low"] < _CHANCE * guess:
        where = "" if learned["accuracy"] < _CHANCE * guess else " with some seeds"
        nothing = Finding(
            f"Synchronous training itself stays near chance{where}, so none can be judged by it",
            said=(f"try a learning rate below {runs[0].experiment['learning_rate']:g}",),
        )
        return sentences([*_said(table), nothing])
    return sentences([*_said(table), *_published(table, learned, guess)])


def _said(table: pd.DataFrame) -> Iterator[Finding]:
    for row in table.itertuples():
        band, percent = (row.accuracy_low, row.accuracy_high), "{:.1%}".format
        said = f"gradients are {row.staleness:.3g} updates old on average"
        yield Finding("", row.way, row.accuracy, band, row.seeds, percent, said=(said,))


def _published(table: pd.DataFrame, waits: pd.Series, guess: float) -> Iterator[Finding]:
    old = table[table["staleness"] >= 10]
    plain = old[old["remedy"] == PLAIN]
    if not plain.empty:
        came = bool((plain["accuracy"] < _CHANCE * guess).all())
        yield Finding(
            f"**Old gradients at the plain rate stay near chance** (Zhang 2016): {it_came(came)}",
            said=(_listed(plain), f"a guess is right in {guess:.0%}"),
        )
    mended = old[old["remedy"] == correction_text("per_gradient")]
    if not mended.empty:
        enough = bool((mended["accuracy_high"] >= waits["accuracy_low"]).all())
        yield Finding(
            f"**At α₀/τ they learn what synchronous ones do** (Zhang 2016): {it_came(enough)}",
            said=(
                _listed(mended),
                f"synchronous training reaches {waits['accuracy']:.1%}, "
                f"{waits['accuracy_low']:.1%} in its worst seed",
            ),
        )


def time_to_target(runs: Sequence[Run], target: float) -> pd.DataFrame:
    """A row a run: its way, whether a worker is slow, and seconds, samples and MiB to a target.

    Args:
        runs: of any strategies.
        target: share of held-out rows that are told right.
    """
    table = to_target({str(number): run for number, run in enumerate(runs)}, target)
    table.insert(0, "way", [way_of(run) for run in runs])
    table.insert(1, "slow", [bool(run.experiment.get("slow")) for run in runs])
    table["MiB"] = table["bytes"] / 2**20
    kept = ["way", "slow", "seeds", "reached", "seconds", "seconds_low", "seconds_high"]
    return table[[*kept, "samples", "MiB"]].set_index("way")


def time_to_target_reading(runs: Sequence[Run], target: float) -> Markdown:
    """Who is first at the target, with a slow worker and without.

    Published: with one slow worker a stale synchronous server is between one that waits for all and
    one that waits for nobody, in time to a given loss (Ho 2013). It came where the means are in
    that order; where bands of seeds overlap, it is said.
    """
    table = time_to_target(runs, target).reset_index()
    found: list[Finding] = []
    first: list[str] = []
    for slow, own in table.groupby("slow"):
        there = own[own["reached"] == own["seeds"]].sort_values("seconds")
        where = "With one slow worker" if slow else "With equal workers"
        for row in there.itertuples():
            band = row.seconds_low, row.seconds_high
            found.append(Finding(where, row.way, row.seconds, band, row.seeds, seconds_text))
        if missing := [row.way for row in own.itertuples() if row.reached < row.seeds]:
            told = ", ".join(dict.fromkeys(missing))
            found.append(Finding(f"{where} {target:.0%} was not reached in all seeds by {told}"))
        if slow:
            found += _between(own)
        if len(there):
            first.append(f"{where.lower()} **{there['way'].iloc[0]}**")
    if first:
        found.append(Finding("First at the goal, by means over seeds", said=tuple(first)))
    return sentences(found)


def _between(own: pd.DataFrame) -> Iterator[Finding]:
    rows = {row.way: row for row in own.itertuples()}
    bound = [way for way in rows if way.startswith("stale synchronous")]
    if not bound or not {_WAITS, "asynchronous"} <= set(rows):
        return
    held = [rows[way] for way in (_WAITS, *bound, "asynchronous")]
    head = (
        "**Stale synchronous servers are between those that wait for all and those that wait for "
        "nobody** (Ho 2013)"
    )
    if missing := [row.way for row in held if row.reached < row.seeds]:
        yield Finding(head, said=(f"cannot be judged, as {', '.join(missing)} did not arrive",))
        return
    slowest, *between, quickest = held
    came = all(quickest.seconds <= row.seconds <= slowest.seconds for row in between)
    apart = all(
        quickest.seconds_high < row.seconds_low and row.seconds_high < slowest.seconds_low
        for row in between
    )
    told = tuple(f"{seconds_text(row.seconds)} with {row.way}" for row in held)
    overlap = () if apart or not came else ("the seeds' bands overlap",)
    yield Finding(f"{head}: {it_came(came)}", said=told + overlap)


def stale_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: way, remedy, splits (0: no softsync), staleness, accuracy, its ends, seeds."""
    rows = []
    for run in runs:
        accuracy = float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        strategy, splits = run.experiment["strategy"], run.experiment["strategy"].get("splits", 0)
        # Only softsync has a line with its remedy; the others are points of their own.
        remedy = correction_text(strategy.get("remedy")) if splits else way_of(run)
        old = float(mean(staleness_of(run)))
        seeds = run.metrics.get("repeats", 1)
        rows.append((way_of(run), remedy, splits, old, accuracy, low, high, seeds))
    columns = ["way", "remedy", "splits", "staleness"]
    columns += ["accuracy", "accuracy_low", "accuracy_high", "seeds"]
    return pd.DataFrame(rows, columns=columns).sort_values("staleness", kind="stable")


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())


_OPEN = "not found"


def softsync_published(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a softsync run: ages of its gradients and its test error, each beside the published.

    Columns: staleness, the mean, published as n; later, the share of gradients more than 2n updates
    old; error, the mean over seeds, with its ends; of what, where and by which mark the error was
    published, see `labkit.simulate.published`.
    """
    table = stale_table(runs).set_index("way")
    rows = {}
    for run in runs:
        strategy, way = run.experiment["strategy"], way_of(run)
        if strategy["name"] != "SoftSync":
            continue
        splits, own = strategy["splits"], table.loc[way]
        known = next(
            (
                each
                for each in SOFTSYNC
                if each.remedy == strategy["remedy"] and splits in (each.splits or (splits,))
            ),
            None,
        )
        rows[way] = {
            "staleness": round(own["staleness"], 2),
            "published staleness": splits,
            "later than 2n": f"{(staleness_of(run) > 2 * splits).mean():.2g}",
            "published later": f"< {SOFTSYNC_LATER:g}",
            "error": f"{1 - own['accuracy']:.1%}",
            "of seeds": f"{1 - own['accuracy_high']:.1%} to {1 - own['accuracy_low']:.1%}",
            "published error": f"{known.error:.0%}" if known else _OPEN,
            "of": known.what if known else "",
            "source": f"{known.source} [{known.mark}]" if known else "",
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("way")


def batch_reading(runs: Sequence[Run]) -> Markdown:
    """Whether smaller batches make up for staleness, at α₀ over the mean staleness.

    Published: at these rates the mini-batch of a learner is what costs accuracy, so that with more
    learners, whose gradients are older, it has to shrink (Gupta 2015, arXiv 1509.04210).

    It came where the seeds' bands are apart.

    Args:
        runs: of softsync, with several batches and several n.
    """
    rows = [
        {"batch": run.experiment["batch_size"], "splits": run.experiment["strategy"]["splits"]}
        | {"accuracy": float(run.metrics["test_accuracy"]), "run": run}
        for run in runs
    ]
    table = pd.DataFrame(rows).sort_values(["batch", "splits"])
    small, large = table["batch"].min(), table["batch"].max()
    young, old = table["splits"].min(), table["splits"].max()
    found = [
        _accuracy(row.run, f"Batch {row.batch}, gradients {row.splits} updates old")
        for row in table.itertuples()
    ]
    if small < large and young < old:
        cells = table.set_index(["batch", "splits"])
        mended, plain = cells.loc[(small, old)], cells.loc[(large, young)]
        # As many samples in all are more updates: what is due to these alone stands beside.
        said = (
            f"batch {small} with gradients {old} updates old {mended.accuracy:.1%}, batch {large} "
            f"with gradients {young} updates old {plain.accuracy:.1%}; batch {small} with such "
            f"young ones {cells.loc[(small, young)].accuracy:.1%}"
        )
        came = it_came(_apart(mended.run, plain.run))
        head = f"**Smaller batches make up for staleness** (Gupta 2015): {came}"
        found.append(Finding(head, said=(said,)))
    return sentences(found)


def rate_reading(runs: Sequence[Run]) -> Markdown:
    """At which learning rates old gradients learn as much as young ones, within the seeds' bands.

    Args:
        runs: of softsync, without a remedy, with several rates and several n.
    """
    by_rate: dict[float, list[Run]] = {}
    for run in sorted(runs, key=lambda run: int(run.experiment["strategy"]["splits"])):
        by_rate.setdefault(float(run.experiment["learning_rate"]), []).append(run)
    found, free = [], []
    for rate, own in sorted(by_rate.items()):
        young, old = own[0], own[-1]
        for run in dict.fromkeys((young, old)):
            splits = run.experiment["strategy"]["splits"]
            found.append(_accuracy(run, f"At {rate:g}, gradients {splits} updates old"))
        free += [f"{rate:g}"] if young is not old and not _apart(young, old) else []
    told = f"at {', '.join(free)}" if free else "at none of these rates"
    return sentences(
        [*found, Finding("**Old gradients learn as much as young ones**", said=(told,))]
    )


def downpour_reading(runs: Sequence[Run]) -> Markdown:
    """Whether Downpour with Adagrad stands an exchange every few batches that plain SGD does not.

    Each has the rate that is best for it where exchanges are most frequent; that which is best
    where they are seldom is told, too. Published: Downpour SGD with Adagrad is fastest with 200
    replicas, and stable (Dean 2012). It came where the seeds' bands are apart.

    Args:
        runs: of Downpour, with both optimizers, several rates, and several batches to an exchange.
    """
    rows = []
    for run in runs:
        strategy, rate = run.experiment["strategy"], run.experiment["learning_rate"]
        accuracy = float(run.metrics["test_accuracy"])
        rows.append((strategy["optimizer"], rate, strategy["fetch_every"], accuracy, run))
    columns = ["optimizer", "rate", "every", "accuracy", "run"]
    table = pd.DataFrame(rows, columns=columns).sort_values(["optimizer", "every", "rate"])
    found = [
        _accuracy(row.run, f"{row.optimizer} at {row.rate:g}, every {row.every} batches")
        for row in table.itertuples()
    ]
    return sentences([*found, *_tolerance(table)])


def _tolerance(table: pd.DataFrame) -> Iterator[Finding]:
    often, seldom = table["every"].min(), table["every"].max()
    kept, said = {}, []
    for optimizer, own in table.groupby("optimizer"):
        by_rate = own.set_index(["every", "rate"])
        cells = by_rate["accuracy"]
        rate, best = cells[often].idxmax(), cells[seldom].idxmax()
        kept[optimizer] = by_rate["run"][seldom, rate]
        said.append(
            f"{optimizer} at {rate:g} has {cells[often, rate]:.1%} every {often} and "
            f"{cells[seldom, rate]:.1%} every {seldom} batches, at {best:g} there "
            f"{cells[seldom, best]:.1%}"
        )
    if often < seldom and {"adagrad", "sgd"} <= set(kept):
        came = it_came(_apart(kept["adagrad"], kept["sgd"]))
        head = f"**Adagrad tolerates staleness that plain SGD does not** (Dean 2012): {came}"
        yield Finding(head, said=tuple(said))


def _apart(better: Run, worse: Run) -> bool:
    """Whether each seed of the one is above all of the other."""
    least, _ = _band(better)
    _, greatest = _band(worse)
    return least > greatest


def _band(run: Run) -> tuple[float, float]:
    accuracy = float(run.metrics["test_accuracy"])
    return spread(run, "test_accuracy") or (accuracy, accuracy)


def _accuracy(run: Run, what: str) -> Finding:
    accuracy = float(run.metrics["test_accuracy"])
    band, seeds = spread(run, "test_accuracy"), run.metrics.get("repeats", 1)
    return Finding(what, value=accuracy, band=band, seeds=seeds, text="{:.1%}".format)
