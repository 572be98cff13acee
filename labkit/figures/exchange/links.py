"""Measured transports and links: exchanges by transport, and allreduces between hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from labkit.common.units import bits_text, bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, ratio_verdict, sentences
from labkit.figures.kit.marks import bars, line_with_band, rule
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.records.run import Run, gate_failed
from labkit.simulate import simulate

# Rows of a benchmark: of `labkit bench transport`, or of `labkit.bench.host_allreduce.measure`.
Row: TypeAlias = Mapping[str, "str | float | None"]
Rows: TypeAlias = Sequence[Row]

TIMES = {"median_ms": "ms", "min_ms": "least ms", "p90_ms": "p90 ms"}
OVER_FASTEST = "times the fastest measured"

BASE = "ring"  # the reference of all other algorithms
GAINS = {"ratio": "ring's time / its own", "ratio_min": "least", "ratio_max": "most"}
PREDICTED_GAINS = GAINS | {"predicted_ratio": "predicted"}
TRAFFIC = {
    "link_bytes": "bytes out of a host",
    "predicted_link_bytes": "bytes by its schedule",
    "wire_bytes": "bytes of all messages",
    "link_ms": "link alone, ms",
    "median_ms": "ms",
    "predicted_ms": "predicted ms",
    "other_place_ms": "placed the other way, predicted ms",
}


def transport_times(rows: Rows) -> Figure:
    """Draw the time of an exchange one way over its bytes: a panel a place, a line a transport.

    Bands reach from the least to the 90th percentile of the repeats. Predicted times have a panel
    of their own.

    Args:
        rows: of `labkit.bench.transports`.
    """
    table = _exchanges(rows)
    looks = lines(table["transport"].unique())
    sizes = float(table["bytes"].min()), float(table["bytes"].max())
    ends = float(table["seconds_low"].min()), float(table["seconds_high"].max())
    panels = [
        Panel(
            title=f"{place}\n{_clocks(group)}",
            x="size of the array",
            y="time one way",
            traces=line_with_band(group, "bytes", "seconds", looks, by="transport", marks=True),
            x_axis=bytes_axis(*sizes),
            y_axis=seconds_axis(*ends),
            link="bytes",
        )
        for place, group in table.groupby("place", sort=False)
    ]
    grid = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    title = f"One exchange by its transport · {_clocks(table)} · network {_networks(rows)}"
    words = [
        f"{place}, {transport}: {seconds_text(group['seconds'].iloc[-1])} for "
        f"{bytes_text(group['bytes'].iloc[-1])}"
        for (place, transport), group in table.groupby(["place", "transport"], sort=False)
    ]
    remark = "markers: medians; bands: least to 90th percentile of the repeats"
    return sheet(grid, looks.values(), title, [remark], words, plot=260)


def transport_steps(trained: Rows) -> Figure:
    """Draw the median training step as a bar a transport and place, with the spread of repeats.

    Args:
        trained: of `labkit.bench.transports.measuring.train`.
    """
    names = [str(row["case"]) for row in trained]
    looks = lines(dict.fromkeys(str(row["transport"]) for row in trained))
    hover = dict(zip(names, map(_arrival, trained), strict=True))
    table = pd.DataFrame(
        {
            "transport": [row["transport"] for row in trained],
            "way": [safe_text(name.replace(", ", "<br>", 1)) for name in names],
            "ms": [row["median_ms"] for row in trained],
            "ms_low": [row["min_ms"] for row in trained],
            "ms_high": [row["p90_ms"] for row in trained],
            "hover": [f"{name}: {text}" for name, text in hover.items()],
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
    words = [f"{name}: {text}" for name, text in hover.items()]
    return sheet([[panel]], looks.values(), title, [], words, plot=80 + 40 * len(names))


def transport_table(rows: Rows, nbytes: int) -> pd.DataFrame:
    """Return a row a transport, place and size (the least and this one): ms, copies, CPU time."""
    table = _exchanges(rows)
    measured = {"processor_ns": "processor ns a byte", "tcp": "by TCP, times the array"}
    table = table[table["bytes"].isin([nbytes, table["bytes"].min()])]
    table = table.rename(columns=TIMES | measured)
    fastest = table[table["clock"] == "wall"].groupby("bytes")["seconds"].min()
    table[OVER_FASTEST] = table["seconds"] / table["bytes"].map(fastest)
    columns = ["transport", "place", "clock", "bytes", *TIMES.values(), OVER_FASTEST]
    columns += ["bandwidth", "copies", "copied", *measured.values()]
    return table[columns].reset_index(drop=True)


def transport_gains(rows: Rows, nbytes: int) -> pd.DataFrame:
    """Return a row a place: the time of two-sided messages over that of one-sided ones.

    `low` and `high` compare the least of the one with the 90th percentile of the other.
    """
    table = _exchanges(rows)
    wall = table[(table["clock"] == "wall") & (table["bytes"] == nbytes)]
    ratios = []
    for place, here in wall.groupby("place", sort=False):
        by = here.set_index("transport")
        if {"one_sided", "two_sided"} <= set(by.index):
            one, two = by.loc["one_sided"], by.loc["two_sided"]
            ratio = two["seconds"] / one["seconds"]
            low = two["seconds_low"] / one["seconds_high"]
            ratios.append((place, ratio, low, two["seconds_high"] / one["seconds_low"]))
    return pd.DataFrame(ratios, columns=["place", "ratio", "low", "high"])


def transport_training(trained: Rows) -> pd.DataFrame:
    """Return a row a transport and place: the training step, time to the target, accuracy."""
    table = pd.DataFrame([dict(row) for row in trained]).rename(columns=TIMES)
    table[OVER_FASTEST] = table["ms"] / table["ms"].min()
    columns = ["transport", "place", "bytes", *TIMES.values(), OVER_FASTEST]
    return table[[*columns, "seconds_to_target", "accuracy"]]


def transport_reading(rows: Rows, nbytes: int, trained: Rows = ()) -> Markdown:
    """Compare transports place by place, at the smallest size, and in training steps.

    Args:
        rows: of `labkit.bench.transports.measuring.measure`, and of `predict`.
        nbytes: the size at which they are compared.
        trained: of `labkit.bench.transports.measuring.train`.
    """
    table = _exchanges(rows)
    group = table[table["bytes"] == nbytes]
    wall = table[table["clock"] == "wall"]
    small = wall[wall["bytes"] == wall["bytes"].min()]
    small = small.assign(name=small["transport"] + " by " + small["place"])
    latency = [_smallest(small, "Latency, ", "seconds")] if len(small) > 1 else []
    gains = [
        _ratio(f"Two-sided over one-sided by {row.place}, {bytes_text(nbytes)}", row[2:5])
        for row in transport_gains(rows, nbytes).itertuples()
    ]
    return sentences([*_by_place(group, nbytes), *gains, *latency, *_steps(trained)])


def _ratio(what: str, values: Sequence[float]) -> Finding:
    """Return the finding of a ratio of times, given with its least and greatest value."""
    ratio, low, high = values
    verdict = ratio_verdict(low, high)
    return Finding(what, value=ratio, band=(low, high), text="{:.2f}".format, verdict=verdict)


def _smallest(table: pd.DataFrame, head: str, column: str, *ends: str) -> Finding:
    """Return the finding on the fastest and the slowest with the smallest buffer, in seconds."""
    ranked = table.sort_values(column).to_dict("records")
    first, last = ranked[0], ranked[-1]
    slower = f"{last['name']} takes {last[column] / first[column]:.2f} times the fastest"
    band = (first[ends[0]], first[ends[1]]) if ends else None
    what = f"{head}{bytes_text(first['bytes'])}"
    return Finding(what, first["name"], first[column], band, text=seconds_text, details=(slower,))


def _exchanges(rows: Rows) -> pd.DataFrame:
    """Return the rows of exchanges, in seconds, with the text of each under the pointer."""
    table = pd.DataFrame([dict(row) for row in rows if row["what"] == "exchange"])
    for column in ("processor_ns", "tcp"):
        if column not in table:
            table[column] = None  # predictions count neither
    for column, details in {
        "seconds": "median",
        "seconds_low": "min",
        "seconds_high": "p90",
    }.items():
        table[column] = table[f"{details}_ms"] / 1e3
    table["hover"] = [
        f"{bytes_text(n)}: {seconds_text(s)}, {bytes_text(n / s)}/s, {copies} copies"
        for n, s, copies in zip(table["bytes"], table["seconds"], table["copies"], strict=True)
    ]
    return table.sort_values("bytes", kind="stable")


def _networks(rows: Rows) -> str:
    """Return the networks of rows; a row without one is of the network of this machine."""
    named = [str(row["network"] or "this machine's own") for row in rows]
    return ", ".join(dict.fromkeys(named))


def _clocks(table: pd.DataFrame) -> str:
    """Return `wall clock`, `simulation, not measured`, or both."""
    texts = {"wall": "wall clock", "simulation": "simulation, not measured"}
    return " and ".join(texts[clock] for clock in table["clock"].unique())


def _by_place(group: pd.DataFrame, nbytes: int) -> Iterator[Finding]:
    """Name the fastest transport in each place, and the ratios of the others."""
    for place, here in group.groupby("place", sort=False):
        ranked = here.sort_values("seconds")
        first = ranked.iloc[0]
        details = [
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
            details=tuple(details),
        )


def _steps(trained: Rows) -> Iterator[Finding]:
    """List the training steps, the fastest first, and when each reached the target."""
    ranked = sorted(trained, key=lambda row: float(row["median_ms"] or 0.0))
    for number, row in enumerate(ranked):
        middle, low, high = (float(row[name] or 0.0) / 1e3 for name in TIMES)
        times = 1e3 * middle / float(ranked[0]["median_ms"] or 1.0)
        slower = (f"{times:.2f} times the fastest",) if number else ()
        what, details = f"A training step, {row['case']}", (*slower, _arrival(row))
        yield Finding(what, value=middle, band=(low, high), text=seconds_text, details=details)


def _arrival(row: Mapping[str, str | float | None]) -> str:
    """Return when the target was reached."""
    there, target = row["seconds_to_target"], float(row["target"] or 0.0)
    if there is None:
        return f"{target:.0%} of held-out rows were not reached"
    return f"{target:.0%} of held-out rows after {float(there):.3g} s"


def hosts_ways(network: Network) -> pd.DataFrame:
    """Return latency and bandwidth between two hosts, and between two ranks of one host."""
    inside = network.host_latency or network.latency, network.host_bandwidth or network.bandwidth
    ways = {"between hosts": (network.latency, network.bandwidth), "inside a host": inside}
    rows = [
        (way, seconds_text(a), bits_text(b), seconds_text(a + 2**20 / b))
        for way, (a, b) in ways.items()
    ]
    return pd.DataFrame(rows, columns=["way", "latency", "bandwidth", "1 MiB takes"])


def hosts_traffic(rows: Rows, network: Network) -> pd.DataFrame:
    """Return a row an algorithm, with the largest buffer: bytes by level, and time on the link.

    Args:
        rows: of `labkit.bench.host_allreduce.measure`.
        network: that it was predicted on.
    """
    table = _table(rows)
    table = table[table["bytes"] == table["bytes"].max()]
    out = table["link_bytes"].fillna(table["predicted_link_bytes"])
    table = table.assign(link_ms=1e3 * out / network.bandwidth)
    return table[["algorithm", "bytes", *TRAFFIC]].rename(columns=TRAFFIC).reset_index(drop=True)


def hosts_gains(rows: Rows) -> pd.DataFrame:
    """Return a row an algorithm and size: the time of the ring over its own, by repeat."""
    table = _table(rows)
    table = table[table["algorithm"] != BASE]
    return (
        table[["algorithm", "bytes", *PREDICTED_GAINS]]
        .rename(columns=PREDICTED_GAINS)
        .reset_index(drop=True)
    )


def hosts_speedup(rows: Rows) -> Figure:
    """Draw the time of the ring over that of each algorithm by bytes, measured and simulated.

    Args:
        rows: of `labkit.bench.host_allreduce.measure`.
    """
    table = _table(rows).rename(columns={"ratio_min": "ratio_low", "ratio_max": "ratio_high"})
    looks = lines(table["algorithm"])  # with the ring, for the colours of other figures
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
                *line_with_band(group, "bytes", column, looks, by="algorithm", marks=True),
            ],
            x_axis=bytes_axis(*ends),
            y_axis={"rangemode": "tozero"},
            link="bytes",
        )
        for title, group, column in (
            ("Measured", table, "ratio"),
            ("Predicted, not measured", known, "predicted_ratio"),
        )
    ]
    title = f"What spares the link · wall clock and simulation · network {rows[0]['network']}"
    remark = "markers: medians of ratios by repeat; bands: least to greatest"
    shown = [looks[name] for name in table["algorithm"].unique()]
    return sheet([panels], shown, title, [remark], list(table["hover"]), plot=250)


def hosts_training(runs: Iterable[Run], network: Network) -> pd.DataFrame:
    """Return a row a run: its step, its ratio to that of the ring, and its predicted allreduce.

    `least` and `most` compare the 10th percentile of the one with the 90th of the other. Runs that
    failed the equivalence gate have no times.
    """
    records = []
    for run in runs:
        name, metrics = run.experiment["strategy"]["algorithm"], run.metrics
        step = {} if gate_failed(run) else metrics["step_ms"]
        nbytes = metrics["payload_bytes_per_step"]
        seconds = simulate(name, run.experiment["workers"], nbytes, network).seconds
        times = [step.get(key) for key in ("median", "p10", "p90")]
        verdict = metrics["equivalence"]["verdict"]
        records.append((name, verdict, nbytes, 1e3 * seconds, *times))
    times = ["step ms", "p10 ms", "p90 ms"]
    columns = ["algorithm", "gate", "bytes", "predicted sum, ms", *times]
    table = pd.DataFrame(records, columns=columns).astype(dict.fromkeys(times, float))
    ring = table[table["algorithm"] == BASE].iloc[0]
    for column, one, other in zip(
        GAINS.values(), times, (times[0], times[2], times[1]), strict=True
    ):
        table[column] = ring[one] / table[other]
    return table


def hosts_reading(rows: Rows, network: Network, runs: Iterable[Run]) -> Markdown:
    """Say which algorithms do not pay, which do, and what crosses the link between hosts.

    Args:
        rows, network: of `labkit.bench.host_allreduce.measure`.
        runs: of the same training, by the ring and by others.
    """
    table = _table(rows)
    findings = [*_gains(table), *_step_gains(hosts_training(runs, network))]
    findings.sort(key=lambda finding: finding.verdict == "it pays")  # null results come first
    small = table[table["bytes"] == table["bytes"].min()].dropna(subset="median_ms")
    small = small.assign(name=small["algorithm"], s=small["median_ms"] / 1e3)
    small = small.assign(low=small["min_ms"] / 1e3, high=small["p90_ms"] / 1e3)
    findings += [_smallest(small, "", "s", "low", "high")] if len(small) else []
    return sentences([*findings, *_levels(hosts_traffic(rows, network), network)])


def _table(rows: Rows) -> pd.DataFrame:
    """Return the rows as a table, without the times of wrong sums."""
    table = pd.DataFrame([dict(row) for row in rows])
    for column in ("link_bytes", "predicted_link_bytes"):
        table[column] = table[column].astype(float)
    times = ["median_ms", "min_ms", "p90_ms", "ratio", "ratio_min", "ratio_max"]
    table.loc[~table["correct"].astype(bool), times] = np.nan
    return table


def _gains(table: pd.DataFrame) -> Iterator[Finding]:
    """Compare the ring with each algorithm at the largest buffer."""
    group = table[(table["bytes"] == table["bytes"].max()) & (table["algorithm"] != BASE)]
    for row in group.itertuples():
        what = f"Time of {BASE} over that of **{row.algorithm}**, {bytes_text(row.bytes)}"
        if not row.correct:
            yield Finding(what, details=("its sums were wrong, so no time is given",))
            continue
        if not np.isnan(row.predicted_ratio):
            what += f", predicted {row.predicted_ratio:.2f}"
        yield _ratio(what, (row.ratio, row.ratio_min, row.ratio_max))


def _step_gains(trained: pd.DataFrame) -> Iterator[Finding]:
    """Compare training steps with the ring and with each other algorithm."""
    for row in trained[trained["algorithm"] != BASE].to_dict("records"):
        what = f"A training step, time of {BASE} over that of **{row['algorithm']}**"
        values = [row[name] for name in GAINS.values()]
        if np.isnan(values[0]):
            yield Finding(what, details=("the gate has failed, so no time is given",))
        else:
            yield _ratio(what, values)


def _levels(traffic: pd.DataFrame, network: Network) -> Iterator[Finding]:
    """Say the latencies of both levels, the time of the ring on the link, and placed otherwise."""
    between, inside = hosts_ways(network).to_dict("records")
    yield Finding(
        "A byte takes",
        details=(f"{between['latency']} between hosts, {inside['latency']} inside one",),
    )
    [ring] = traffic[traffic["algorithm"] == BASE].to_dict("records")
    names = [TRAFFIC[name] for name in ("link_ms", "predicted_ms", "other_place_ms")]
    alone, group, other = (seconds_text(ring[name] / 1e3) for name in names)
    details = f"of {group}, as predicted, its bytes have the link for {alone}"
    yield Finding(f"**{BASE}**, {bytes_text(ring['bytes'])}", details=(details,))
    details = f"{other} by prediction, in place of {group}"
    yield Finding(f"Ranks placed the other way, {BASE} would take", details=(details,))
