"""What stale gradients cost, what mends it, and who is first at a target although he waits less."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import mean
from typing import TYPE_CHECKING

from labkit.common.units import seconds_text
from labkit.figures.kit.entries import clock_and_network, entries, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.interleaving import staleness_of
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.columns import spread
from labkit.records.analysis.spending import to_target
from labkit.records.run import Run

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

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
    plain = old[old["remedy"] == _PLAIN]
    if not plain.empty:
        came = bool((plain["accuracy"] < _CHANCE * guess).all())
        yield Finding(
            f"**Old gradients at the plain rate stay near chance** (Zhang 2016): {it_came(came)}",
            said=(_listed(plain), f"a guess is right in {guess:.0%}"),
        )
    mended = old[old["remedy"] == _words("per_gradient")]
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


def race(runs: Sequence[Run], target: float) -> pd.DataFrame:
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


def race_reading(runs: Sequence[Run], target: float) -> Markdown:
    """Who is first at the target, with a slow worker and without.

    Published: with one slow worker a stale synchronous server is between one that waits for all and
    one that waits for nobody, in time to a given loss (Ho 2013). It came where the means are in
    that order; where bands of seeds overlap, it is said.
    """
    table = race(runs, target).reset_index()
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


_PLAIN = "at α₀"


def _words(remedy: str | None) -> str:
    told = {
        "per_gradient": "at α₀/τ",
        "mean": "at α₀ over the mean",
        "momentum": "less momentum",
        "delay_compensated": "delay-compensated",
    }
    return told.get(str(remedy), _PLAIN)


def way_of(run: Run) -> str:
    """`synchronous`; `stale synchronous, s = 2`; `softsync 4, at α₀/τ`."""
    strategy = run.experiment["strategy"]
    name, remedy = str(strategy["name"]), strategy.get("remedy")
    mended = f", {_words(remedy)}" if remedy else ""
    if name == "StaleSynchronous":
        return f"stale synchronous, s = {strategy['staleness']}{mended}"
    if name == "SoftSync":
        return f"softsync {strategy['splits']}{mended}"
    if name == "Downpour":
        return f"downpour, every {strategy['fetch_every']}"
    if name == "ParameterServer":
        return "synchronous" if strategy["synchronous"] else "asynchronous"
    return safe_text(name)


def stale_table(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a run: way, remedy, splits (0: no softsync), staleness, accuracy, its ends, seeds."""
    import pandas as pd

    rows = []
    for run in runs:
        accuracy = float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        strategy, splits = run.experiment["strategy"], run.experiment["strategy"].get("splits", 0)
        # Only softsync has a line with its remedy; the others are points of their own.
        remedy = _words(strategy.get("remedy")) if splits else way_of(run)
        old = float(mean(staleness_of(run)))
        seeds = run.metrics.get("repeats", 1)
        rows.append((way_of(run), remedy, splits, old, accuracy, low, high, seeds))
    columns = ["way", "remedy", "splits", "staleness"]
    columns += ["accuracy", "accuracy_low", "accuracy_high", "seeds"]
    return pd.DataFrame(rows, columns=columns).sort_values("staleness", kind="stable")


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(f"{row.way} {row.accuracy:.1%}" for row in table.itertuples())
