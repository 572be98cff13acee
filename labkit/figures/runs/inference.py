"""Trained models in use: parallel inference, and compression for deployment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pandas as pd

from labkit.common.units import bytes_axis, bytes_text, plural
from labkit.figures.kit.axes import SHARES, counts_axis
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import OVERSUBSCRIBED, PALETTE, SYMBOLS, Line, lines, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import Looks, line_with_band, points_with_bars
from labkit.figures.kit.panels import Panel
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.serving_runs import ALONE, Served

_SLICES = "slices"
LATENCY, RATE = "latency_ms", "rows_per_second"


def serving(served: Served) -> Figure:
    """Draw latency and throughput over the rows of a batch, a column a network.

    Lines are medians. The band of a latency spans p10 to p90, that of a throughput all streams.

    Args:
        served: the result of `labkit.cluster.serve`.
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
    group = table[table["network"] == network].sort_values("batch_size", kind="stable")
    kind = "latency, band p10 to p90" if is_latency else "throughput, band least to most"
    details = [
        f"{row['way']}, batches of {row['batch_size']}: {_text(column, row[column])}"
        for row in group.to_dict("records")
    ]
    return Panel(
        title=f"{network}\n{kind}",
        x="rows of a batch",
        y="ms from batch to answer" if is_latency else "rows/s",
        traces=line_with_band(
            group.assign(hover=[safe_text(each) for each in details]),
            "batch_size",
            column,
            looks,
            by="way",
            marks=True,
        ),
        x_axis=counts_axis(group["batch_size"]),
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
    """Name the lowest latency and highest throughput, and say whether slicing pays.

    One is ahead of another where their spreads do not meet: p10 to p90 of latencies, all streams of
    throughputs.
    """
    latency, rate = served.latency(), served.throughput()
    networks = list(dict.fromkeys(latency["network"]))
    firsts = [_soonest(latency, network) for network in networks]
    mosts = [_most(rate, network) for network in networks]
    slices = [_slices(latency, network) for network in networks if _SLICES in set(latency["way"])]
    findings = [*firsts, *mosts, *slices, _weights(served), _true(served)]
    if served.oversubscribed:
        processes = f"{served.workers} ranks of {plural(served.threads, 'thread')}"
        findings.append(
            Finding(f"{processes} are more than cores: they take turns, and times say so")
        )
    return sentences([*findings, _all(networks, firsts, mosts)])


_MEET = "spreads meet"


def _soonest(latency: pd.DataFrame, network: str) -> Finding:
    """Return the lowest latency at the smallest batch."""
    size = min(latency["batch_size"])
    group = latency[(latency["network"] == network) & (latency["batch_size"] == size)]
    first, *others = group.sort_values(LATENCY, kind="stable").to_dict("records")
    ahead = all(first[f"{LATENCY}_high"] < each[f"{LATENCY}_low"] for each in others)
    return Finding(
        f"Lowest latency in batches of {size}, {network}",
        first["way"],
        first[LATENCY],
        (first[f"{LATENCY}_low"], first[f"{LATENCY}_high"]),
        text="{:.2f} ms".format,
        details=(_next(others[0], LATENCY),),
        verdict=_verdict(ahead),
    )


def _most(rate: pd.DataFrame, network: str) -> Finding:
    """Return the highest throughput, with the best batch of each way."""
    group = rate[rate["network"] == network].sort_values(RATE, ascending=False, kind="stable")
    first, *others = group.drop_duplicates("way").to_dict("records")
    ahead = all(first[f"{RATE}_low"] > each[f"{RATE}_high"] for each in others)
    return Finding(
        f"Highest throughput, {network}",
        first["way"],
        first[RATE],
        (first[f"{RATE}_low"], first[f"{RATE}_high"]),
        text="{:,.0f} rows/s".format,
        details=(f"in batches of {first['batch_size']}", _next(others[0], RATE)),
        verdict=_verdict(ahead),
    )


def _next(row: dict[str, float], column: str) -> str:
    return f"the next, {row['way']}, {_text(column, row[column])}"


def _verdict(ahead: bool) -> str:
    return "ahead of all others beyond the spread" if ahead else _MEET


def _winner(results: Finding) -> str:
    """Return the way that is ahead beyond the spread."""
    return "nobody beyond the spread" if results.verdict == _MEET else results.who


def _slices(latency: pd.DataFrame, network: str) -> Finding:
    """Compare slices with one process, batch by batch."""
    group = latency[latency["network"] == network]
    ours, alone = (group[group["way"] == way].set_index("batch_size") for way in (_SLICES, ALONE))
    pays = [n for n in ours.index if ours[f"{LATENCY}_high"][n] < alone[f"{LATENCY}_low"][n]]
    least = ours["of_one_process"].idxmin()
    best = f"at best {ours['of_one_process'][least]:.2f} of one process's latency (batches of"
    return Finding(
        f"Slices, {network}",
        details=(f"{best} {least})",),
        verdict=(
            f"slicing pays in batches of {', '.join(map(str, pays))}"
            if pays
            else "slicing pays in no batches, beyond the spread"
        ),
    )


def _weights(served: Served) -> Finding:
    table = served.memory()
    held = [f"{way} {bytes_text(most)}" for way, most in table["most_weights_bytes"].items()]
    return Finding("Weights on the rank that holds most", details=(", ".join(held),))


def _true(served: Served) -> Finding:
    far = max(served.differences.values())
    details = f"{far:.1e} is the largest difference, where rounding may make {served.allowed:.1e}"
    return Finding("All ways answer as one process does", details=(details,))


def _all(networks: list[str], firsts: list[Finding], mosts: list[Finding]) -> Finding:
    """Return the conclusion over all networks."""
    pairs = [
        f"{network}: {_winner(first)} and {_winner(most)}"
        for network, first, most in zip(networks, firsts, mosts, strict=True)
    ]
    return Finding("Who answers a small batch first, and who most rows a second", details=(*pairs,))


ORIGINAL = "original"
LEVEL = 0.05  # of the sign test, below which accuracies differ
WORTH = 1.02  # ratio of sizes below which files count as equally large

Row: TypeAlias = dict[str, Any]  # of what `labkit.deployment.compare` returned


def deployment(table: pd.DataFrame) -> Figure:
    """Draw accuracy over bytes on disk, and over the time of an inference, a marker a method.

    A marker's shape is the family of its method; up and to the left is better in both
    panels. The whisker spans the repeats. Methods that could do nothing with the model are named.

    Args: table: the result of `labkit.deployment.compare`.
    """
    rows = _measured(table)
    shown = _lines(rows)
    panels = _panels(table[table["bytes"].notna()], shown)
    refused = [name for name, row in _rows(table).items() if row["bytes"] != row["bytes"]]
    remark = f"not possible with this model: {', '.join(refused)}" if refused else ""
    title = f"Compressed for deployment, {len(rows) - 1} ways · wall clock · 1 process"
    words = "; ".join(
        f"{name}: {row['accuracy']:.1%} of the test data right, {bytes_text(row['bytes'])}, "
        f"{row['time_ratio']:.3g} times the original's inference time"
        for name, row in rows.items()
    )
    return sheet([panels], shown.values(), title, [remark], [words], plot=300)


def deployment_reading(table: pd.DataFrame) -> Markdown:
    """Say what each method lost and saved, and name the smallest file without a loss."""
    rows = _rows(table)
    original = rows[ORIGINAL]
    findings = [
        f"**{ORIGINAL}**: {original['accuracy']:.1%} of {original['test_answers']:.0f} test "
        f"answers right, {bytes_text(original['bytes'])} on disk, {original['inference_ms']:.3g} "
        f"ms for a batch of {original['batch_size']:.0f}"
    ]
    others = {name: row for name, row in _measured(table).items() if name != ORIGINAL}
    for name, row in rows.items():
        if name in others:
            parts = (row["what"], _accuracy(row), _bytes(row), _time(row))
            findings.append(f"**{name}**: {'; '.join(parts)}")
        elif name != ORIGINAL:
            findings.append(f"**{name}**: not possible with this model. {row['what']}")
    return sentences(map(Finding, [*findings, *_together(others)]))


def _accuracy(row: Row) -> str:
    details = f"{row['accuracy']:.1%} right"
    if not row["lost"] + row["gained"]:
        return f"{details}, on the same answers as the original"
    details = (
        f"{details}, {row['lost']:.0f} lost and {row['gained']:.0f} gained against the original"
    )
    if row["chance"] >= LEVEL:
        return f"{details}, which chance could do (p = {row['chance']:.2g})"
    return f"{details}, {'better' if row['gained'] > row['lost'] else 'worse'} beyond chance"


def _bytes(row: Row) -> str:
    text = f"{bytes_text(row['bytes'])}, {_times(row['smaller'], 'smaller', 'larger')}"
    if row["file"].endswith(".keras"):
        return text
    # Anybody has so much for nothing.
    return f"{text}; gzip leaves {bytes_text(row['keras_gzip_bytes'])} of its .keras file"


def _time(row: Row) -> str:
    spread = f"{row['time_ratio_low']:.2f} to {row['time_ratio_high']:.2f}"
    details = f"{row['time_ratio']:.2f}x the original's inference time (repeats {spread})"
    if _faster(row):
        return f"{details}: faster"
    if row["time_ratio_low"] > 1:
        return f"{details}: slower"
    return f"{details}: no difference beyond the spread"


def _together(others: dict[str, Row]) -> list[str]:
    lines = []
    if trained := [name for name, row in others.items() if row["extra_epochs"]]:
        lines.append(
            f"Trained longer than the original: {', '.join(trained)}. What they gain in accuracy "
            "may be the training's"
        )
    faster = [name for name, row in others.items() if _faster(row)]
    lines.append(f"Faster than the original beyond the spread: {', '.join(faster) or 'none'}")
    kept = {name: row for name, row in others.items() if _kept(row) and row["smaller"] > WORTH}
    if not kept:
        return [*lines, "Each file here that is smaller has lost accuracy beyond chance"]
    best = min(kept, key=lambda name: kept[name]["bytes"])
    return [
        *lines,
        f"Smallest file whose loss, if any, these test answers cannot tell from chance: "
        f"**{best}** ({kept[best]['lost']:.0f} lost, {kept[best]['gained']:.0f} gained), "
        f"{kept[best]['smaller']:.3g}x smaller than the original",
    ]


def _kept(row: Row) -> bool:
    """Whether the test shows no loss of accuracy."""
    return bool(row["gained"] >= row["lost"] or row["chance"] >= LEVEL)


def _faster(row: Row) -> bool:
    return bool(row["time_ratio_high"] < 1)


def _times(ratio: float, more: str, less: str) -> str:
    if 1 / WORTH <= ratio <= WORTH:
        return "as large (within 2 %)"
    return f"{ratio:.3g}x {more}" if ratio > 1 else f"{1 / ratio:.3g}x {less}"


def _rows(table: pd.DataFrame) -> dict[str, Row]:
    return dict(zip(map(str, table.index), table.to_dict("records"), strict=True))


def _measured(table: pd.DataFrame) -> dict[str, Row]:
    # NaN, which is not equal to itself, is what a method has that the model does not allow.
    return {name: row for name, row in _rows(table).items() if row["bytes"] == row["bytes"]}


def _lines(rows: dict[str, Row]) -> dict[str, Line]:
    """Return a symbol a family of methods, and a colour a member."""
    members: dict[str, list[str]] = {}
    for name, row in rows.items():
        members.setdefault(row["family"], []).append(name)
    return {
        name: Line(
            label=name,
            color=PALETTE[names.index(name) % len(PALETTE)],
            dash="solid",
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, names in enumerate(members.values())
        for name in names
    }


def _panels(table: pd.DataFrame, shown: dict[str, Line]) -> list[Panel]:
    """Return panels of accuracy over bytes on disk, and over the time of an inference."""
    rows = table.assign(run=table.index.map(str), hover=[*map(_hover, table.to_dict("records"))])
    batch, right = rows["batch_size"].iloc[0], ("accuracy on the test data", dict(SHARES))
    return [
        Panel(
            title="Bytes on disk\nof the file that is read back",
            x="bytes on disk",
            y=right[0],
            traces=points_with_bars(rows, "bytes", "accuracy", shown, size=11),
            x_axis=bytes_axis(0.8 * rows["bytes"].min(), 1.25 * rows["bytes"].max()),
            y_axis=right[1],
        ),
        Panel(
            title="Time of an inference\nwhisker: least to largest of the repeats",
            x=f"time of a batch of {batch:.0f} / the original's",
            y=right[0],
            traces=points_with_bars(rows, "time_ratio", "accuracy", shown, size=11),
            x_axis={"rangemode": "tozero"},
            y_axis=right[1],
        ),
    ]


def _hover(row: Row) -> str:
    return (
        f"{row['accuracy']:.2%} right<br>{bytes_text(row['bytes'])}, {row['smaller']:.3g}x smaller"
        f"<br>{row['inference_ms']:.3g} ms, {row['time_ratio']:.2f}x the original's"
    )
