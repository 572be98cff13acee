"""Stale gradients beside what was published of them: figures, smaller batches, Adagrad."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.runs.interleaving import staleness_of
from labkit.figures.runs.servers import it_came
from labkit.figures.runs.stale import stale_table, way_of
from labkit.records.analysis.columns import spread
from labkit.records.run import Run
from labkit.simulate import SOFTSYNC, SOFTSYNC_LATER

if TYPE_CHECKING:
    import pandas as pd

_OPEN = "not found"


def softsync_published(runs: Sequence[Run]) -> pd.DataFrame:
    """A row a softsync run: ages of its gradients and its test error, each beside the published.

    Columns: staleness, the mean, published as n; later, the share of gradients more than 2n updates
    old; error, the mean over seeds, with its ends; of what, where and by which mark the error was
    published, see `labkit.simulate.published`.
    """
    import pandas as pd

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
    import pandas as pd

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
    import pandas as pd

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
