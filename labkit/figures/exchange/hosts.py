"""Sums between hosts: what the link costs, which allreduce spares it, what of it training feels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from labkit.common.units import bits_text, bytes_axis, bytes_text, seconds_text
from labkit.figures.kit.entries import lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import line_with_band, rule
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.records.run import Run, gate_failed
from labkit.simulate import simulate

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

# What `labkit.bench.host_allreduce.measure` returns, a row an algorithm and size.
Rows: TypeAlias = Sequence[Mapping[str, "str | float | None"]]

BASE = "ring"  # to which the others are held
_GAINS = {"ratio": "ring's time / its own", "ratio_min": "least", "ratio_max": "most"}
_GAINS |= {"predicted_ratio": "predicted"}
_TRAFFIC = {
    "link_bytes": "bytes out of a host",
    "predicted_link_bytes": "bytes by its schedule",
    "wire_bytes": "bytes of all messages",
    "link_ms": "link alone, ms",
    "median_ms": "ms",
    "predicted_ms": "predicted ms",
    "other_place_ms": "placed the other way, predicted ms",
}
_OF_RING = [_TRAFFIC[name] for name in ("link_ms", "predicted_ms", "other_place_ms")]


def hosts_ways(network: Network) -> pd.DataFrame:
    """What a message meets between two hosts, and between two ranks of one: a row each."""
    import pandas as pd

    inside = network.host_latency or network.latency, network.host_bandwidth or network.bandwidth
    ways = {"between hosts": (network.latency, network.bandwidth), "inside a host": inside}
    rows = [
        (
            way,
            seconds_text(latency),
            bits_text(bandwidth),
            seconds_text(latency + 2**20 / bandwidth),
        )
        for way, (latency, bandwidth) in ways.items()
    ]
    return pd.DataFrame(rows, columns=["way", "latency", "bandwidth", "1 MiB takes"])


def hosts_traffic(rows: Rows, network: Network) -> pd.DataFrame:
    """A row an algorithm, the largest buffer: bytes by level, and for how long the link has them.

    Args:
        rows: of `labkit.bench.host_allreduce.measure`.
        network: that it was predicted on.
    """
    table = _table(rows)
    table = table[table["bytes"] == table["bytes"].max()]
    out = table["link_bytes"].fillna(table["predicted_link_bytes"])
    table = table.assign(link_ms=1e3 * out / network.bandwidth)
    return table[["algorithm", "bytes", *_TRAFFIC]].rename(columns=_TRAFFIC).reset_index(drop=True)


def hosts_gains(rows: Rows) -> pd.DataFrame:
    """A row an algorithm and size: how many times as long the ring takes, by repeat."""
    table = _table(rows)
    table = table[table["algorithm"] != BASE]
    return table[["algorithm", "bytes", *_GAINS]].rename(columns=_GAINS).reset_index(drop=True)


def hosts_speedup(rows: Rows) -> Figure:
    """How many times as long the ring takes, over the bytes: measured, and as simulated.

    Args:
        rows: of `labkit.bench.host_allreduce.measure`.
    """
    table = _table(rows).rename(columns={"ratio_min": "ratio_low", "ratio_max": "ratio_high"})
    looks = lines(table["algorithm"])  # the ring has one, too: as in figures of all
    table = table[table["algorithm"] != BASE]
    ends = [table["bytes"].min() / 1.5, table["bytes"].max() * 1.5]
    table["hover"] = [
        f"{row.algorithm}, {bytes_text(row.bytes)}: ring takes {row.ratio:.2f} times as long"
        for row in table.itertuples()
    ]
    known = table.dropna(subset="predicted_ratio")
    panels = [
        Panel(
            title=f"{title}\nabove 1: faster than the ring",
            x="size of the buffer",
            y="ring's time / its own",
            traces=[
                rule(ends, [1, 1], "dash"),
                *line_with_band(own, "bytes", column, looks, by="algorithm", marks=True),
            ],
            x_axis=bytes_axis(*ends),
            y_axis={"rangemode": "tozero"},
            link="bytes",
        )
        for title, own, column in (
            ("Measured", table, "ratio"),
            ("Predicted, not measured", known, "predicted_ratio"),
        )
    ]
    title = f"What spares the link · wall clock and simulation · network {rows[0]['network']}"
    remark = "markers: medians of ratios by repeat; bands: least to greatest"
    shown = [looks[name] for name in table["algorithm"].unique()]
    return sheet([panels], shown, title, [remark], list(table["hover"]), plot=250)


def hosts_training(runs: Iterable[Run], network: Network) -> pd.DataFrame:
    """A row a run: the step, as a multiple of the ring's, and its sum as it is predicted.

    `least` and `most` hold the 10th percentile of the one against the 90th of the other. Of a run
    that failed its gate there are no times.
    """
    import pandas as pd

    found = []
    for run in runs:
        name, metrics = run.experiment["strategy"]["algorithm"], run.metrics
        step = {} if gate_failed(run) else metrics["step_ms"]
        nbytes = metrics["payload_bytes_per_step"]
        seconds = simulate(name, run.experiment["workers"], nbytes, network).seconds
        times = [step.get(key) for key in ("median", "p10", "p90")]
        verdict = metrics["equivalence"]["verdict"]
        found.append((name, verdict, nbytes, 1e3 * seconds, *times))
    times = ["step ms", "p10 ms", "p90 ms"]
    columns = ["algorithm", "gate", "bytes", "predicted sum, ms", *times]
    table = pd.DataFrame(found, columns=columns).astype(dict.fromkeys(times, float))
    ring = table[table["algorithm"] == BASE].iloc[0]
    for column, one, other in zip(
        list(_GAINS.values())[:3], times, (times[0], times[2], times[1]), strict=True
    ):
        table[column] = ring[one] / table[other]
    return table


def hosts_reading(rows: Rows, network: Network, runs: Iterable[Run]) -> Markdown:
    """What does not pay first; then what does, what crosses the link, and what training feels.

    Args:
        rows, network: of `labkit.bench.host_allreduce.measure`.
        runs: of the same training, by the ring and by others.
    """
    table, trained = _table(rows), hosts_training(runs, network)
    found = [*_gained(table), *_stepped(trained)]
    found.sort(key=lambda each: each.verdict == "it pays")  # a null result is told first
    return sentences([*found, *_least(table), *_levels(hosts_traffic(rows, network), network)])


def _table(rows: Rows) -> pd.DataFrame:
    """The rows; those whose sums were wrong have no times."""
    import pandas as pd

    table = pd.DataFrame([dict(row) for row in rows])
    for column in ("link_bytes", "predicted_link_bytes"):
        table[column] = table[column].astype(float)
    times = ["median_ms", "min_ms", "p90_ms", "ratio", "ratio_min", "ratio_max"]
    table.loc[~table["correct"].astype(bool), times] = np.nan
    return table


def _verdict(low: float, high: float) -> str:
    return "it pays" if low > 1 else "it does not pay" if high < 1 else "no difference"


def _gained(table: pd.DataFrame) -> Iterator[Finding]:
    """The ring held against each, at the largest buffer."""
    own = table[(table["bytes"] == table["bytes"].max()) & (table["algorithm"] != BASE)]
    for row in own.itertuples():
        what = f"Time of {BASE} over that of **{row.algorithm}**, {bytes_text(row.bytes)}"
        if not row.correct:
            yield Finding(what, said=("its sums were wrong, so no time is given",))
            continue
        if row.predicted_ratio == row.predicted_ratio:
            what += f", predicted {row.predicted_ratio:.2f}"
        band = row.ratio_min, row.ratio_max
        yield Finding(what, "", row.ratio, band, text="{:.2f}".format, verdict=_verdict(*band))


def _stepped(trained: pd.DataFrame) -> Iterator[Finding]:
    """The same of training steps."""
    middle, *ends = list(_GAINS.values())[:3]
    for row in trained[trained["algorithm"] != BASE].to_dict("records"):
        what = f"A training step, time of {BASE} over that of **{row['algorithm']}**"
        if np.isnan(row[middle]):
            yield Finding(what, said=("the gate has failed, so no time is given",))
            continue
        band = row[ends[0]], row[ends[1]]
        yield Finding(what, "", row[middle], band, text="{:.2f}".format, verdict=_verdict(*band))


def _least(table: pd.DataFrame) -> Iterator[Finding]:
    """Who is first with the smallest buffer."""
    own = table[table["bytes"] == table["bytes"].min()].dropna(subset="median_ms")
    ranked = own.sort_values("median_ms").to_dict("records")
    for first in ranked[:1]:
        last = ranked[-1]
        slower = f"{last['algorithm']} takes {last['median_ms'] / first['median_ms']:.2f}"
        yield Finding(
            bytes_text(first["bytes"]),
            first["algorithm"],
            first["median_ms"] / 1e3,
            (first["min_ms"] / 1e3, first["p90_ms"] / 1e3),
            text=seconds_text,
            said=(f"{slower} times the fastest",),
        )


def _levels(traffic: pd.DataFrame, network: Network) -> Iterator[Finding]:
    """What a byte waits for, for how long the ring has the link, and placed the other way."""
    between, inside = hosts_ways(network).to_dict("records")
    yield Finding(
        "A byte takes",
        said=(f"{between['latency']} between hosts, {inside['latency']} inside one",),
    )
    [ring] = traffic[traffic["algorithm"] == BASE].to_dict("records")
    alone, own, other = (seconds_text(ring[name] / 1e3) for name in _OF_RING)
    said = f"of {own}, as predicted, its bytes have the link for {alone}"
    yield Finding(f"**{BASE}**, {bytes_text(ring['bytes'])}", said=(said,))
    said = f"{other} by prediction, in place of {own}"
    yield Finding(f"Ranks placed the other way, {BASE} would take", said=(said,))
