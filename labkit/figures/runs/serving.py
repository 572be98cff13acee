"""Answers by replicas, stages and slices: latency and throughput by batch, on each network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.common.units import bytes_text, plural
from labkit.figures.kit.entries import OVERSUBSCRIBED, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import Looks, line_with_band
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.serving_runs import ALONE, Served

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.canvas import Figure

_SLICES = "slices"
LATENCY, RATE = "latency_ms", "rows_per_second"


def serving(served: Served) -> Figure:
    """Latency (above) and throughput (below) over the rows of a batch, a column a network.

    Lines are medians. The band of a latency spans p10 to p90, that of a throughput all streams.

    Args:
        served: what `labkit.cluster.serve` has measured.
    """
    latency, rate = served.latency(), served.throughput()
    networks = list(dict.fromkeys(latency["network"]))
    looks = lines(dict.fromkeys(latency["way"]))
    rows = [
        [_panel(table, column, network, looks) for network in networks]
        for table, column in ((latency, LATENCY), (rate, RATE))
    ]
    star = " *" if served.oversubscribed else ""
    ranks = f"{plural(served.workers, 'rank')} × {plural(served.threads, 'thread')}{star}"
    title = f"Predicting together · {ranks} · wall clock"
    remarks = [f"streams of {plural(served.under_way, 'batch')}"]
    remarks += [OVERSUBSCRIBED] if served.oversubscribed else []
    return sheet(rows, looks.values(), title, remarks, [*_words(latency, rate)], plot=220)


def _panel(table: pd.DataFrame, column: str, network: str, looks: Looks) -> Panel:
    is_latency = column == LATENCY
    own = table[table["network"] == network].sort_values("batch_size", kind="stable")
    kind = "latency, band p10 to p90" if is_latency else "throughput, band least to most"
    sizes = sorted(set(own["batch_size"]))
    said = [
        f"{row['way']}, batches of {row['batch_size']}: {_text(column, row[column])}"
        for row in own.to_dict("records")
    ]
    return Panel(
        title=f"{network}\n{kind}",
        x="rows of a batch",
        y="ms from batch to answer" if is_latency else "rows/s",
        traces=line_with_band(
            own.assign(hover=[safe_text(each) for each in said]),
            "batch_size",
            column,
            looks,
            by="way",
            marks=True,
        ),
        x_axis={"type": "log", "tickvals": sizes, "ticktext": [str(size) for size in sizes]},
        y_axis={"type": "log", "rangemode": "normal"},
    )


def _words(latency: pd.DataFrame, rate: pd.DataFrame) -> Iterator[str]:
    for table, column in ((latency, LATENCY), (rate, RATE)):
        for row in table.to_dict("records"):
            place = f"{row['network']}, {row['way']}, batches of {row['batch_size']}"
            yield f"{place}: {_text(column, row[column])}"


def _text(column: str, value: float) -> str:
    return f"{value:.2f} ms" if column == LATENCY else f"{value:,.0f} rows/s"


def serving_reading(served: Served) -> Markdown:
    """Who answers first, who answers most, whether slicing pays, what a rank holds, and is it true.

    One is ahead of another where their spreads do not meet: p10 to p90 of latencies, all streams of
    throughputs.
    """
    latency, rate = served.latency(), served.throughput()
    networks = list(dict.fromkeys(latency["network"]))
    firsts = [_soonest(latency, network) for network in networks]
    mosts = [_most(rate, network) for network in networks]
    slices = [_slices(latency, network) for network in networks if _SLICES in set(latency["way"])]
    found = [*firsts, *mosts, *slices, _weights(served), _true(served)]
    if served.oversubscribed:
        processes = f"{served.workers} ranks of {plural(served.threads, 'thread')}"
        found.append(Finding(f"{processes} are more than cores: they take turns, and times say so"))
    return sentences([*found, _all(networks, firsts, mosts)])


_MEET = "spreads meet"


def _soonest(latency: pd.DataFrame, network: str) -> Finding:
    """At the smallest batch."""
    size = min(latency["batch_size"])
    own = latency[(latency["network"] == network) & (latency["batch_size"] == size)]
    first, *others = own.sort_values(LATENCY, kind="stable").to_dict("records")
    ahead = all(first[f"{LATENCY}_high"] < each[f"{LATENCY}_low"] for each in others)
    return Finding(
        f"Lowest latency in batches of {size}, {network}",
        first["way"],
        first[LATENCY],
        (first[f"{LATENCY}_low"], first[f"{LATENCY}_high"]),
        text="{:.2f} ms".format,
        said=(_next(others[0], LATENCY),),
        verdict=_verdict(ahead),
    )


def _most(rate: pd.DataFrame, network: str) -> Finding:
    """In batches of any size, each way in its best."""
    own = rate[rate["network"] == network].sort_values(RATE, ascending=False, kind="stable")
    first, *others = own.drop_duplicates("way").to_dict("records")
    ahead = all(first[f"{RATE}_low"] > each[f"{RATE}_high"] for each in others)
    return Finding(
        f"Highest throughput, {network}",
        first["way"],
        first[RATE],
        (first[f"{RATE}_low"], first[f"{RATE}_high"]),
        text="{:,.0f} rows/s".format,
        said=(f"in batches of {first['batch_size']}", _next(others[0], RATE)),
        verdict=_verdict(ahead),
    )


def _next(row: dict[str, float], column: str) -> str:
    return f"the next, {row['way']}, {_text(column, row[column])}"


def _verdict(ahead: bool) -> str:
    return "ahead of all others beyond the spread" if ahead else _MEET


def _winner(found: Finding) -> str:
    """Who is ahead, beyond the spread."""
    return "nobody beyond the spread" if found.verdict == _MEET else found.who


def _slices(latency: pd.DataFrame, network: str) -> Finding:
    """Against one process, batch by batch."""
    own = latency[latency["network"] == network]
    ours, alone = (own[own["way"] == way].set_index("batch_size") for way in (_SLICES, ALONE))
    pays = [n for n in ours.index if ours[f"{LATENCY}_high"][n] < alone[f"{LATENCY}_low"][n]]
    least = ours["of_one_process"].idxmin()
    best = f"at best {ours['of_one_process'][least]:.2f} of one process's latency (batches of"
    return Finding(
        f"Slices, {network}",
        said=(f"{best} {least})",),
        verdict=(
            f"slicing pays in batches of {', '.join(map(str, pays))}"
            if pays
            else "slicing pays in no batches, beyond the spread"
        ),
    )


def _weights(served: Served) -> Finding:
    table = served.memory()
    held = [f"{way} {bytes_text(most)}" for way, most in table["most_weights_bytes"].items()]
    return Finding("Weights on the rank that holds most", said=(", ".join(held),))


def _true(served: Served) -> Finding:
    far = max(served.differences.values())
    said = f"{far:.1e} is the largest difference, where rounding may make {served.allowed:.1e}"
    return Finding("All ways answer as one process does", said=(said,))


def _all(networks: list[str], firsts: list[Finding], mosts: list[Finding]) -> Finding:
    """What stands alone."""
    pairs = [
        f"{network}: {_winner(first)} and {_winner(most)}"
        for network, first, most in zip(networks, firsts, mosts, strict=True)
    ]
    return Finding("Who answers a small batch first, and who most rows a second", said=(*pairs,))
