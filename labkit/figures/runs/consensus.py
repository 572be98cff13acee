"""How far apart gossiping replicas are: their distance by epochs, beside their graph's gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.entries import clock_and_network, entries
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_over_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import busy, sheet
from labkit.figures.runs.servers import it_came
from labkit.records.analysis.columns import spread
from labkit.records.analysis.losses import epoch_results, loss_curve
from labkit.records.run import Run
from labkit.strategies import Gossip

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

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
    import pandas as pd

    rows = []
    for run in runs:
        accuracy = float(run.metrics["test_accuracy"])
        low, high = spread(run, "test_accuracy") or (accuracy, accuracy)
        way, gap = _way(run)
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
    return sentences([*_said(table), *_published(table)])


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


def _said(table: pd.DataFrame) -> Iterator[Finding]:
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


def _way(run: Run) -> tuple[str, float]:
    """Who mixes with whom, and the spectral gap of that; not a number where all meet."""
    fields = dict(run.experiment["strategy"])
    if fields.pop("name") != "Gossip":
        return _TOGETHER, float("nan")
    strategy = Gossip.model_validate(fields)
    topology = strategy.topology if isinstance(strategy.topology, str) else "a matrix"
    way = topology.replace("_", " ") + (_FREE if strategy.asynchronous else "")
    return way, strategy.spectral_gap(int(run.experiment["workers"]))
