"""Figures of measured message transports, and of measured allreduces across hosts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import pandas as pd

from labkit.common.units import bits_text, bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Finding, Markdown, lines, ratio_verdict, safe_text, sentences
from labkit.figures.kit.marks import bars, line_with_band, rule
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.records.run import Run, equivalence_failed
from labkit.simulate import simulate

# A `Row` is a measurement of the command `labkit bench transport` or of the function
# `labkit.bench.host_allreduce.measure`.
Row: TypeAlias = Mapping[str, "str | float | None"]
Rows: TypeAlias = Sequence[Row]

TIMES = {"median_ms": "ms", "min_ms": "least ms", "p90_ms": "p90 ms"}
OVER_FASTEST = "time / fastest measured time"

BASE = "ring"  # The figures compare all other algorithms with the algorithm `BASE`, the ring.
GAINS = {"ratio": "ring's time / the algorithm's time", "ratio_min": "least", "ratio_max": "most"}
PREDICTED_GAINS = GAINS | {"predicted_ratio": "predicted"}
TRAFFIC = {
    "link_bytes": "bytes that leave a host",
    "predicted_link_bytes": "predicted bytes that leave a host",
    "wire_bytes": "bytes of all messages",
    "link_ms": "predicted time on the link, ms",
    "median_ms": "ms",
    "predicted_ms": "predicted ms",
    "other_mapping_ms": "predicted ms with the other rank placement",
}


def transport_times(rows: Rows) -> Figure:
    """Draw one-way message time over bytes: one panel per rank placement, one line per transport.

    Each band spans the times of the repeats, from the minimum to the 90th percentile. Predicted
    times have separate panels.

    Args:
        rows: Measurements or predictions of `labkit.bench.transports`.
    """
    table = _exchanges(rows)
    looks = lines(table["transport"].unique())
    sizes = float(table["bytes"].min()), float(table["bytes"].max())
    ends = float(table["seconds_low"].min()), float(table["seconds_high"].max())
    panels = [
        Panel(
            title=f"{place}\n{_clocks(group)}",
            x="array size",
            y="one-way time",
            traces=line_with_band(group, "bytes", "seconds", looks, by="transport", marks=True),
            x_axis=bytes_axis(*sizes),
            y_axis=seconds_axis(*ends),
            link="bytes",
        )
        for place, group in table.groupby("place", sort=False)
    ]
    grid = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    title = (
        f"Time to transfer an array, by transport · {_clocks(table)} · network {_networks(rows)}"
    )
    words = [
        f"{place}, {transport}: {seconds_text(group['seconds'].iloc[-1])} for "
        f"{bytes_text(group['bytes'].iloc[-1])}"
        for (place, transport), group in table.groupby(["place", "transport"], sort=False)
    ]
    remark = "markers: medians; bands: minimum to 90th percentile of the repeats"
    return sheet(grid, looks.values(), title, [remark], words, plot=260)


def transport_steps(trained: Rows) -> Figure:
    """Draw the median time of a training step per transport and rank placement, and its spread.

    Args:
        trained: Measured training steps, from `labkit.bench.transports.measuring.train`.
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
        title="Training step, one worker and one server\nmedian; whisker: minimum to 90th "
        "percentile",
        x="step time, ms",
        y="way",
        traces=bars(table, "ms", "way", looks, by="transport", horizontal=True),
        x_axis={"rangemode": "tozero"},
        y_axis={"autorange": "reversed", "automargin": True},
    )
    title = f"Training step by transport · wall clock · network {_networks(trained)}"
    words = [f"{name}: {text}" for name, text in hover.items()]
    return sheet([[panel]], looks.values(), title, [], words, plot=80 + 40 * len(names))


def transport_table(rows: Rows, nbytes: int) -> pd.DataFrame:
    """Return message time, number of copies and CPU time per transport, rank placement and size.

    The table has two message sizes: the least measured size and `nbytes`.
    """
    table = _exchanges(rows)
    measured = {
        "processor_ns": "processor time per byte, ns",
        "tcp": "bytes sent by TCP / bytes of the array",
    }
    table = table[table["bytes"].isin([nbytes, table["bytes"].min()])]
    table = table.rename(columns=TIMES | measured)
    fastest = table[table["clock"] == "wall"].groupby("bytes")["seconds"].min()
    table[OVER_FASTEST] = table["seconds"] / table["bytes"].map(fastest)
    columns = ["transport", "place", "clock", "bytes", *TIMES.values(), OVER_FASTEST]
    columns += ["bandwidth", "copies", "copied", *measured.values()]
    return table[columns].reset_index(drop=True)


def transport_gains(rows: Rows, nbytes: int) -> pd.DataFrame:
    """Return the time of two-sided messages divided by that of one-sided ones, per placement.

    `low` is a lower bound of the ratio of times. `low` divides a fast two-sided time by a slow
    one-sided time. `high` is an upper bound of the ratio of times. `high` is the 90th percentile of
    two-sided times, divided by the minimum one-sided time.
    """
    table = _exchanges(rows)
    wall = table[(table["clock"] == "wall") & (table["bytes"] == nbytes)]
    ratios = []
    for place, place_rows in wall.groupby("place", sort=False):
        by = place_rows.set_index("transport")
        if {"one_sided", "two_sided"} <= set(by.index):
            one, two = by.loc["one_sided"], by.loc["two_sided"]
            ratio = two["seconds"] / one["seconds"]
            low = two["seconds_low"] / one["seconds_high"]
            ratios.append((place, ratio, low, two["seconds_high"] / one["seconds_low"]))
    return pd.DataFrame(ratios, columns=["place", "ratio", "low", "high"])


def transport_training(trained: Rows) -> pd.DataFrame:
    """Return a row per transport and rank placement: step time, time to target, and accuracy."""
    table = pd.DataFrame([dict(row) for row in trained]).rename(columns=TIMES)
    table[OVER_FASTEST] = table["ms"] / table["ms"].min()
    columns = ["transport", "place", "bytes", *TIMES.values(), OVER_FASTEST]
    return table[[*columns, "seconds_to_target", "accuracy"]]


def summarize_transport(rows: Rows, nbytes: int, trained: Rows = ()) -> Markdown:
    """Compare transports by rank placement, at the smallest message size, and in training steps.

    Args:
        rows: Results of `labkit.bench.transports.measuring.measure` and `predict`.
        nbytes: Message size in bytes at which the transports are compared.
        trained: Measured training steps, from `labkit.bench.transports.measuring.train`.
    """
    table = _exchanges(rows)
    group = table[table["bytes"] == nbytes]
    wall = table[table["clock"] == "wall"]
    small = wall[wall["bytes"] == wall["bytes"].min()]
    small = small.assign(name=small["transport"] + " by " + small["place"])
    latency = [_smallest(small, "Latency, ", "seconds")] if len(small) > 1 else []
    gains = [
        _ratio(
            f"Ratio of the two-sided to the one-sided time by {row.place}, {bytes_text(nbytes)}",
            row[2:5],
        )
        for row in transport_gains(rows, nbytes).itertuples()
    ]
    return sentences([*_by_place(group, nbytes), *gains, *latency, *_steps(trained)])


def _ratio(what: str, values: Sequence[float]) -> Finding:
    """Return a finding about a speed-up with the values (ratio, minimum, maximum)."""
    ratio, low, high = values
    verdict = ratio_verdict(low, high)
    return Finding(what, value=ratio, band=(low, high), text="{:.2f}".format, verdict=verdict)


def _smallest(table: pd.DataFrame, head: str, column: str, *ends: str) -> Finding:
    """Return a finding about the fastest and slowest measurement at one message size."""
    ranked = table.sort_values(column).to_dict("records")
    first, last = ranked[0], ranked[-1]
    slower = f"{last['name']} takes {last[column] / first[column]:.2f} times the fastest"
    band = (first[ends[0]], first[ends[1]]) if ends else None
    what = f"{head}{bytes_text(first['bytes'])}"
    return Finding(what, first["name"], first[column], band, text=seconds_text, details=(slower,))


def _exchanges(rows: Rows) -> pd.DataFrame:
    """Return the rows of message exchanges, with times in seconds and a hover text."""
    table = pd.DataFrame([dict(row) for row in rows if row["what"] == "exchange"])
    for column in ("processor_ns", "tcp"):
        if column not in table:
            table[column] = None  # Predictions contain no CPU time and no TCP byte count.
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
    """Name the networks of the measurements; call an unnamed network `of this machine`."""
    named = [str(row["network"] or "of this machine") for row in rows]
    return ", ".join(dict.fromkeys(named))


def _clocks(table: pd.DataFrame) -> str:
    """Name the clocks of the measurements: `wall clock`, `simulation, not measured`, or both."""
    texts = {"wall": "wall clock", "simulation": "simulation, not measured"}
    return " and ".join(texts[clock] for clock in table["clock"].unique())


def _by_place(group: pd.DataFrame, nbytes: int) -> Iterator[Finding]:
    """Yield one finding per rank placement, with the fastest transport and its lead."""
    for place, place_rows in group.groupby("place", sort=False):
        ranked = place_rows.sort_values("seconds")
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
    """Yield a finding per measured training, shortest step first, with its time to the target."""
    ranked = sorted(trained, key=lambda row: float(row["median_ms"] or 0.0))
    for number, row in enumerate(ranked):
        middle, low, high = (float(row[name] or 0.0) / 1e3 for name in TIMES)
        times = 1e3 * middle / float(ranked[0]["median_ms"] or 1.0)
        slower = (f"{times:.2f} times the fastest",) if number else ()
        what, details = f"Training step, {row['case']}", (*slower, _arrival(row))
        yield Finding(what, value=middle, band=(low, high), text=seconds_text, details=details)


def _arrival(row: Mapping[str, str | float | None]) -> str:
    """Describe the time until the target accuracy is reached."""
    seconds, target = row["seconds_to_target"], float(row["target"] or 0.0)
    if seconds is None:
        return f"the target accuracy {target:.0%} was not reached"
    return f"target accuracy {target:.0%} after {float(seconds):.3g} s"


def hosts_ways(network: Network) -> pd.DataFrame:
    """Return latency and bandwidth between hosts, and between ranks on one host."""
    inside = network.host_latency or network.latency, network.host_bandwidth or network.bandwidth
    ways = {"between hosts": (network.latency, network.bandwidth), "inside a host": inside}
    rows = [
        (way, seconds_text(a), bits_text(b), seconds_text(a + 2**20 / b))
        for way, (a, b) in ways.items()
    ]
    return pd.DataFrame(rows, columns=["way", "latency", "bandwidth", "1 MiB takes"])


def hosts_traffic(rows: Rows, network: Network) -> pd.DataFrame:
    """Return, for the largest buffer, each algorithm's total bytes, bytes between hosts, and times.

    Args:
        rows: Measurements of `labkit.bench.host_allreduce.measure`.
        network: Network between the hosts; its bandwidth determines the transfer time of bytes.
    """
    table = _table(rows)
    table = table[table["bytes"] == table["bytes"].max()]
    out = table["link_bytes"].fillna(table["predicted_link_bytes"])
    table = table.assign(link_ms=1e3 * out / network.bandwidth)
    return table[["algorithm", "bytes", *TRAFFIC]].rename(columns=TRAFFIC).reset_index(drop=True)


def hosts_gains(rows: Rows) -> pd.DataFrame:
    """Return each algorithm's speed-up over the ring by buffer size, from ratios per repeat."""
    table = _table(rows)
    table = table[table["algorithm"] != BASE]
    return (
        table[["algorithm", "bytes", *PREDICTED_GAINS]]
        .rename(columns=PREDICTED_GAINS)
        .reset_index(drop=True)
    )


def hosts_speedup(rows: Rows) -> Figure:
    """Draw each algorithm's speed-up over the ring by buffer size, measured and simulated.

    Args:
        rows: Measurements of `labkit.bench.host_allreduce.measure`.
    """
    table = _table(rows).rename(columns={"ratio_min": "ratio_low", "ratio_max": "ratio_high"})
    # Every algorithm, even the ring, gets a line style, so that colours agree between figures.
    looks = lines(table["algorithm"])
    table = table[table["algorithm"] != BASE]
    ends = [table["bytes"].min() / 1.5, table["bytes"].max() * 1.5]
    table["hover"] = [
        f"{row.algorithm}, {bytes_text(row.bytes)}: the ring takes {row.ratio:.2f} times as long"
        for row in table.itertuples()
    ]
    known = table.dropna(subset="predicted_ratio")
    panels = [
        Panel(
            title=f"{title}\nabove 1: faster than the ring",
            x="buffer size",
            y="speed-up over the ring",
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
    title = f"Speed-up over the ring · wall clock and simulation · network {rows[0]['network']}"
    remark = "markers: medians of the ratios of repeats; bands: minimum to maximum"
    shown = [looks[name] for name in table["algorithm"].unique()]
    return sheet([panels], shown, title, [remark], list(table["hover"]), plot=250)


def hosts_training(runs: Iterable[Run], network: Network) -> pd.DataFrame:
    """Return a row per run: step time, speed-up over the ring, and predicted allreduce time.

    `least` is the ring's p10 step time divided by the run's p90 step time. `most` is the ring's p90
    step time divided by the run's p10 step time. Runs that failed the equivalence check have no
    times.
    """
    records = []
    for run in runs:
        name, metrics = run.experiment["strategy"]["algorithm"], run.metrics
        step = {} if equivalence_failed(run) else metrics["step_ms"]
        nbytes = metrics["payload_bytes_per_step"]
        seconds = simulate(name, run.experiment["workers"], nbytes, network).seconds
        times = [step.get(key) for key in ("median", "p10", "p90")]
        verdict = metrics["equivalence"]["verdict"]
        records.append((name, verdict, nbytes, 1e3 * seconds, *times))
    times = ["step ms", "p10 ms", "p90 ms"]
    columns = ["algorithm", "equivalence", "bytes", "predicted sum, ms", *times]
    table = pd.DataFrame(records, columns=columns).astype(dict.fromkeys(times, float))
    ring = table[table["algorithm"] == BASE].iloc[0]
    for column, one, other in zip(
        GAINS.values(), times, (times[0], times[2], times[1]), strict=True
    ):
        table[column] = ring[one] / table[other]
    return table


def summarize_hosts(rows: Rows, network: Network, runs: Iterable[Run]) -> Markdown:
    """Summarize which algorithms are faster than the ring, and the traffic between hosts.

    Args:
        rows, network: Measurements of `labkit.bench.host_allreduce.measure`, and the measured
            network.
        runs: Runs of one experiment, with the ring and with other allreduce algorithms.
    """
    table = _table(rows)
    findings = [*_gains(table), *_step_gains(hosts_training(runs, network))]
    # In the summary, algorithms that are not faster than the ring come first.
    findings.sort(key=lambda finding: finding.verdict == "it pays")
    small = table[table["bytes"] == table["bytes"].min()].dropna(subset="median_ms")
    small = small.assign(name=small["algorithm"], s=small["median_ms"] / 1e3)
    small = small.assign(low=small["min_ms"] / 1e3, high=small["p90_ms"] / 1e3)
    findings += [_smallest(small, "", "s", "low", "high")] if len(small) else []
    return sentences([*findings, *_levels(hosts_traffic(rows, network), network)])


def _table(rows: Rows) -> pd.DataFrame:
    """Return the measurements as a table; allreduces with wrong sums have no times."""
    table = pd.DataFrame([dict(row) for row in rows])
    for column in ("link_bytes", "predicted_link_bytes"):
        table[column] = table[column].astype(float)
    times = ["median_ms", "min_ms", "p90_ms", "ratio", "ratio_min", "ratio_max"]
    table.loc[~table["correct"].astype(bool), times] = np.nan
    return table


def _gains(table: pd.DataFrame) -> Iterator[Finding]:
    """Yield a finding per algorithm: its speed-up over the ring at the largest buffer."""
    group = table[(table["bytes"] == table["bytes"].max()) & (table["algorithm"] != BASE)]
    for row in group.itertuples():
        what = f"Speed-up of **{row.algorithm}** over {BASE}, {bytes_text(row.bytes)}"
        if not row.correct:
            yield Finding(what, details=("no time is shown, because the sums were wrong",))
            continue
        if not np.isnan(row.predicted_ratio):
            what += f", predicted {row.predicted_ratio:.2f}"
        yield _ratio(what, (row.ratio, row.ratio_min, row.ratio_max))


def _step_gains(trained: pd.DataFrame) -> Iterator[Finding]:
    """Yield one finding per algorithm: how much faster a training step is than with the ring."""
    for row in trained[trained["algorithm"] != BASE].to_dict("records"):
        what = f"Training step, speed-up of **{row['algorithm']}** over {BASE}"
        values = [row[name] for name in GAINS.values()]
        if np.isnan(values[0]):
            yield Finding(what, details=("no time is shown, because the equivalence check failed",))
        else:
            yield _ratio(what, values)


def _levels(traffic: pd.DataFrame, network: Network) -> Iterator[Finding]:
    """Yield findings about the latency of the network and the time of a ring allreduce."""
    between, inside = hosts_ways(network).to_dict("records")
    yield Finding(
        "Latency",
        details=(f"{between['latency']} between hosts, {inside['latency']} within a host",),
    )
    [ring] = traffic[traffic["algorithm"] == BASE].to_dict("records")
    names = [TRAFFIC[name] for name in ("link_ms", "predicted_ms", "other_mapping_ms")]
    alone, total, other = (seconds_text(ring[name] / 1e3) for name in names)
    details = f"predicted time {total}, of which the link transfers bytes for {alone}"
    yield Finding(f"**{BASE}**, {bytes_text(ring['bytes'])}", details=(details,))
    details = f"predicted {other} instead of {total}"
    yield Finding(f"With the other placement of ranks, {BASE} takes", details=(details,))
