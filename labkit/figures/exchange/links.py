"""Measured transports and links: exchanges by transport, and allreduces between hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from labkit.common.units import bits_text, bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import bars, line_with_band, rule
from labkit.figures.kit.sheet import Panel, sheet
from labkit.network import Network
from labkit.records.run import Run, gate_failed
from labkit.simulate import simulate

# What `labkit bench transport` writes, a row a way and size.
Rows: TypeAlias = Sequence[Mapping[str, "str | float | None"]]

_TIMES = {"median_ms": "ms", "min_ms": "least ms", "p90_ms": "p90 ms"}
_SHOWN = {"processor_ns": "processor ns a byte", "tcp": "by TCP, times the array", **_TIMES}
_OVER = "times the fastest measured"
_ALONE = [_SHOWN["processor_ns"], _SHOWN["tcp"]]  # of what is measured


def transport_times(rows: Rows) -> Figure:
    """Seconds of an exchange one way over its bytes: a panel a place, a line a transport.

    Bands reach from the least to the 90th percentile of the repeats. What is predicted has a panel
    of its own, whose title says so.

    Args:
        rows: of `labkit.bench.transports`.
    """
    table = _exchanges(rows)
    looks = lines(table["transport"].unique())
    sizes = float(table["bytes"].min()), float(table["bytes"].max())
    ends = float(table["seconds_low"].min()), float(table["seconds_high"].max())
    panels = [
        Panel(
            title=f"{place}\n{_clocks(own)}",
            x="size of the array",
            y="time one way",
            traces=line_with_band(own, "bytes", "seconds", looks, by="transport", marks=True),
            x_axis=bytes_axis(*sizes),
            y_axis=seconds_axis(*ends),
            link="bytes",
        )
        for place, own in table.groupby("place", sort=False)
    ]
    grid = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    title = f"One exchange by its transport · {_clocks(table)} · network {_networks(rows)}"
    words = [
        f"{place}, {transport}: {seconds_text(own['seconds'].iloc[-1])} for "
        f"{bytes_text(own['bytes'].iloc[-1])}"
        for (place, transport), own in table.groupby(["place", "transport"], sort=False)
    ]
    remark = "markers: medians; bands: least to 90th percentile of the repeats"
    return sheet(grid, looks.values(), title, [remark], words, plot=260)


def transport_steps(trained: Rows) -> Figure:
    """A bar a way: the median training step, with the least and the 90th percentile of repeats.

    Args:
        trained: of `labkit.bench.transports.measuring.train`.
    """
    names = [str(row["case"]) for row in trained]
    looks = lines(dict.fromkeys(str(row["transport"]) for row in trained))
    said = dict(zip(names, map(_arrival, trained), strict=True))
    table = pd.DataFrame(
        {
            "transport": [row["transport"] for row in trained],
            "way": [safe_text(name.replace(", ", "<br>", 1)) for name in names],
            "ms": [row["median_ms"] for row in trained],
            "ms_low": [row["min_ms"] for row in trained],
            "ms_high": [row["p90_ms"] for row in trained],
            "hover": [f"{name}: {text}" for name, text in said.items()],
        }
    )
    panel = Panel(
        title="A training step, one worker and one server\nmedian; bar: least to 90th percentile",
        x="ms a step",
        y="way",
        traces=bars(table, "ms", "way", looks, by="transport", horizontal=True),
        x_axis={"rangemode": "tozero"},
        y_axis={"autorange": "reversed", "automargin": True},
    )
    title = f"Training by its transport · wall clock · network {_networks(trained)}"
    words = [f"{name}: {text}" for name, text in said.items()]
    return sheet([[panel]], looks.values(), title, [], words, plot=80 + 40 * len(names))


def transport_table(rows: Rows, nbytes: int) -> pd.DataFrame:
    """A row a transport, place and size, the least and this one: ms, copies, processor time."""
    table = _exchanges(rows)
    table = table[table["bytes"].isin([nbytes, table["bytes"].min()])].rename(columns=_SHOWN)
    fastest = table[table["clock"] == "wall"].groupby("bytes")["seconds"].min()
    table[_OVER] = table["seconds"] / table["bytes"].map(fastest)
    columns = ["transport", "place", "clock", "bytes", *_TIMES.values(), _OVER]
    return table[[*columns, "bandwidth", "copies", "copied", *_ALONE]].reset_index(drop=True)


def transport_gains(rows: Rows, nbytes: int) -> pd.DataFrame:
    """A row a place: how many times as long two-sided messages take there as one-sided ones.

    `low` and `high` hold the least of the one against the 90th percentile of the other.
    """
    table = _exchanges(rows)
    wall = table[(table["clock"] == "wall") & (table["bytes"] == nbytes)]
    found = []
    for place, here in wall.groupby("place", sort=False):
        by = here.set_index("transport")
        if {"one_sided", "two_sided"} <= set(by.index):
            one, two = by.loc["one_sided"], by.loc["two_sided"]
            ratio = two["seconds"] / one["seconds"]
            low = two["seconds_low"] / one["seconds_high"]
            found.append((place, ratio, low, two["seconds_high"] / one["seconds_low"]))
    return pd.DataFrame(found, columns=["place", "ratio", "low", "high"])


def transport_training(trained: Rows) -> pd.DataFrame:
    """A row a way: the training step, when the target was reached, the accuracy."""
    table = pd.DataFrame([dict(row) for row in trained]).rename(columns=_TIMES)
    table[_OVER] = table["ms"] / table["ms"].min()
    columns = ["transport", "place", "bytes", *_TIMES.values(), _OVER]
    return table[[*columns, "seconds_to_target", "accuracy"]]


def transport_reading(rows: Rows, nbytes: int, trained: Rows = ()) -> Markdown:
    """Who is how many times as fast as whom, place by place; what of it training feels.

    Args:
        rows: of `labkit.bench.transports.measuring.measure`, and of `predict`.
        nbytes: the size at which they are compared.
        trained: of `labkit.bench.transports.measuring.train`.
    """
    table = _exchanges(rows)
    own = table[table["bytes"] == nbytes]
    found = [*_by_place(own, nbytes), *_within(rows, nbytes), *_small(table), *_steps(trained)]
    return sentences(found)


def _exchanges(rows: Rows) -> pd.DataFrame:
    """The rows of exchanges, in seconds, with what each says under the pointer."""
    table = pd.DataFrame([dict(row) for row in rows if row["what"] == "exchange"])
    for column in ("processor_ns", "tcp"):
        if column not in table:
            table[column] = None  # of what is predicted nothing was counted
    for column, said in {"seconds": "median", "seconds_low": "min", "seconds_high": "p90"}.items():
        table[column] = table[f"{said}_ms"] / 1e3
    table["hover"] = [
        f"{bytes_text(n)}: {seconds_text(s)}, {bytes_text(n / s)}/s, {copies} copies"
        for n, s, copies in zip(table["bytes"], table["seconds"], table["copies"], strict=True)
    ]
    return table.sort_values("bytes", kind="stable")


def _networks(rows: Rows) -> str:
    """Each that rows name, and this machine's own where they name none."""
    named = [str(row["network"] or "this machine's own") for row in rows]
    return ", ".join(dict.fromkeys(named))


def _clocks(table: pd.DataFrame) -> str:
    """`wall clock`; `simulation, not measured`."""
    said = {"wall": "wall clock", "simulation": "simulation, not measured"}
    return " and ".join(said[clock] for clock in table["clock"].unique())


def _by_place(own: pd.DataFrame, nbytes: int) -> Iterator[Finding]:
    """The fastest in each place, and how many times as long the others take."""
    for place, here in own.groupby("place", sort=False):
        ranked = here.sort_values("seconds")
        first = ranked.iloc[0]
        said = [
            f"{row.transport} takes {row.seconds / first.seconds:.2f} times the fastest"
            for row in ranked.iloc[1:].itertuples()
        ]
        band = float(first["seconds_low"]), float(first["seconds_high"])
        measured = first["clock"] == "wall"
        yield Finding(
            f"{bytes_text(nbytes)}, {place}{'' if measured else ' and not measured'}",
            str(first["transport"]),
            float(first["seconds"]),
            band if measured else None,
            text=seconds_text,
            said=tuple(said),
        )


def _within(rows: Rows, nbytes: int) -> Iterator[Finding]:
    """What one-sidedness gains in each place, where both are measured there."""
    for row in transport_gains(rows, nbytes).itertuples():
        verdict = "it pays" if row.low > 1 else "it does not pay" if row.high < 1 else ""
        yield Finding(
            f"Two-sided over one-sided by {row.place}, {bytes_text(nbytes)}",
            value=row.ratio,
            band=(row.low, row.high),
            text="{:.2f}".format,
            verdict=verdict or "no difference",
        )


def _small(table: pd.DataFrame) -> Iterator[Finding]:
    """Who is first with the smallest array that was measured."""
    wall = table[table["clock"] == "wall"]
    least = wall[wall["bytes"] == wall["bytes"].min()].sort_values("seconds")
    if len(least) > 1:
        first, last = least.iloc[0], least.iloc[-1]
        yield Finding(
            f"Latency, {bytes_text(first['bytes'])}",
            f"{first['transport']} by {first['place']}",
            float(first["seconds"]),
            text=seconds_text,
            said=(
                f"{last['transport']} by {last['place']} takes "
                f"{last['seconds'] / first['seconds']:.2f} times the fastest",
            ),
        )


def _steps(trained: Rows) -> Iterator[Finding]:
    """What a training step takes by each way, and when the target was reached."""
    ranked = sorted(trained, key=lambda row: float(row["median_ms"] or 0.0))
    for number, row in enumerate(ranked):
        times = float(row["median_ms"] or 0.0) / float(ranked[0]["median_ms"] or 1.0)
        slower = (f"{times:.2f} times the fastest",) if number else ()
        yield Finding(
            f"A training step, {row['case']}",
            value=float(row["median_ms"] or 0.0) / 1e3,
            band=(float(row["min_ms"] or 0.0) / 1e3, float(row["p90_ms"] or 0.0) / 1e3),
            text=seconds_text,
            said=(*slower, _arrival(row)),
        )


def _arrival(row: Mapping[str, str | float | None]) -> str:
    """When the target was reached."""
    there, target = row["seconds_to_target"], float(row["target"] or 0.0)
    if there is None:
        return f"{target:.0%} of held-out rows were not reached"
    return f"{target:.0%} of held-out rows after {float(there):.3g} s"


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
        rows: of `labkit.bench.hosts.between.measure`.
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
        rows: of `labkit.bench.hosts.between.measure`.
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
        rows, network: of `labkit.bench.hosts.between.measure`.
        runs: of the same training, by the ring and by others.
    """
    table, trained = _table(rows), hosts_training(runs, network)
    found = [*_gained(table), *_stepped(trained)]
    found.sort(key=lambda each: each.verdict == "it pays")  # a null result is told first
    return sentences([*found, *_least(table), *_levels(hosts_traffic(rows, network), network)])


def _table(rows: Rows) -> pd.DataFrame:
    """The rows; those whose sums were wrong have no times."""
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
