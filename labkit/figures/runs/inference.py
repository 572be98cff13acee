"""Figures and summaries of parallel inference, and of model compression for deployment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import pandas as pd

from labkit.common.units import bytes_axis, bytes_text, plural
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import (
    OVERSUBSCRIBED,
    PALETTE,
    SYMBOLS,
    Finding,
    LineStyle,
    Markdown,
    lines,
    safe_text,
    sentences,
)
from labkit.figures.kit.marks import Looks, line_with_band, points_with_bars
from labkit.figures.kit.panels import SHARES, Panel, counts_axis
from labkit.figures.kit.sheet import sheet
from labkit.records.analysis.serving_runs import ONE_PROCESS, ServingMeasurements

_SLICES = "slices"
LATENCY, RATE = "latency_ms", "rows_per_second"


def serving(served: ServingMeasurements) -> Figure:
    """Draw latency and throughput over batch size, with one column of panels per network.

    Lines show medians of latencies and throughputs. For latencies, a band shows the 10th to 90th
    percentile. For throughputs, a band shows the range over all measured request streams.

    Args:
        served: Measured latencies and throughputs, the result of `labkit.cluster.serve`.
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
    title = f"Parallel inference · {ranks} · wall clock"
    remarks = [f"{plural(served.under_way, 'batch')} in flight per request stream"]
    remarks += [OVERSUBSCRIBED] if served.oversubscribed else []
    return sheet(rows, looks.values(), title, remarks, [*_words(latency, rate)], plot=220)


def _panel(table: pd.DataFrame, column: str, network: str, looks: Looks) -> Panel:
    is_latency = column == LATENCY
    group = table[table["network"] == network].sort_values("batch_size", kind="stable")
    kind = (
        "latency; band: p10 to p90 of the batches"
        if is_latency
        else "throughput; band: range over request streams"
    )
    details = [
        f"{row['way']}, batches of {row['batch_size']}: {_text(column, row[column])}"
        for row in group.to_dict("records")
    ]
    return Panel(
        title=f"{network}\n{kind}",
        x="batch size, rows",
        y="latency of a batch, ms" if is_latency else "rows/s",
        traces=line_with_band(
            group.assign(hover=[safe_text(detail) for detail in details]),
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


def summarize_serving(served: ServingMeasurements) -> Markdown:
    """Summarize the lowest latency, the highest throughput, and the gain from slicing the model.

    A configuration counts as better than another if their spreads do not overlap. The spread is p10
    to p90 of latencies, or the range of throughputs over all streams.
    """
    latency, rate = served.latency(), served.throughput()
    networks = list(dict.fromkeys(latency["network"]))
    lowest_latencies = [_lowest_latency(latency, network) for network in networks]
    highest_throughputs = [_highest_throughput(rate, network) for network in networks]
    slices = [_slices(latency, network) for network in networks if _SLICES in set(latency["way"])]
    findings = [
        *lowest_latencies,
        *highest_throughputs,
        *slices,
        _weights(served),
        _differences(served),
    ]
    if served.oversubscribed:
        processes = f"{served.workers} ranks with {plural(served.threads, 'thread')} each"
        findings.append(
            Finding(f"{processes} need more cores than the host has, which makes all times longer")
        )
    return sentences([*findings, _best_by_network(networks, lowest_latencies, highest_throughputs)])


_MEET = "spreads overlap"


def _lowest_latency(latency: pd.DataFrame, network: str) -> Finding:
    """Name the configuration with the lowest latency for the smallest batch."""
    size = min(latency["batch_size"])
    group = latency[(latency["network"] == network) & (latency["batch_size"] == size)]
    first, *others = group.sort_values(LATENCY, kind="stable").to_dict("records")
    is_ahead = all(first[f"{LATENCY}_high"] < other[f"{LATENCY}_low"] for other in others)
    return Finding(
        f"Lowest latency with batches of {plural(int(size), 'row')}, {network}",
        first["way"],
        first[LATENCY],
        (first[f"{LATENCY}_low"], first[f"{LATENCY}_high"]),
        text="{:.2f} ms".format,
        details=(_next_text(others[0], LATENCY),),
        verdict=_verdict(is_ahead),
    )


def _highest_throughput(rate: pd.DataFrame, network: str) -> Finding:
    """Return a finding about the configuration with the most throughput at its best batch size."""
    group = rate[rate["network"] == network].sort_values(RATE, ascending=False, kind="stable")
    first, *others = group.drop_duplicates("way").to_dict("records")
    is_ahead = all(first[f"{RATE}_low"] > other[f"{RATE}_high"] for other in others)
    return Finding(
        f"Highest throughput, {network}",
        first["way"],
        first[RATE],
        (first[f"{RATE}_low"], first[f"{RATE}_high"]),
        text="{:,.0f} rows/s".format,
        details=(f"with batches of {first['batch_size']}", _next_text(others[0], RATE)),
        verdict=_verdict(is_ahead),
    )


def _next_text(row: dict[str, float], column: str) -> str:
    return f"next {row['way']}, {_text(column, row[column])}"


def _verdict(is_ahead: bool) -> str:
    return "better than all other strategies beyond the spread" if is_ahead else _MEET


def _winner(results: Finding) -> str:
    """Return the best configuration if its spread overlaps no other, or "no clear winner"."""
    return "no clear winner" if results.verdict == _MEET else results.subject


def _slices(latency: pd.DataFrame, network: str) -> Finding:
    """For each batch size, compare a sliced model's latency with the latency of one process."""
    group = latency[latency["network"] == network]
    ours, alone = (
        group[group["way"] == way].set_index("batch_size") for way in (_SLICES, ONE_PROCESS)
    )
    pays = [n for n in ours.index if ours[f"{LATENCY}_high"][n] < alone[f"{LATENCY}_low"][n]]
    least = ours["of_one_process"].idxmin()
    best = (
        f"lowest latency relative to one process: {ours['of_one_process'][least]:.2f} (with "
        "batches of"
    )
    return Finding(
        f"Slices, {network}",
        details=(f"{best} {least})",),
        verdict=(
            f"slicing the model reduces latency with batches of {', '.join(map(str, pays))}"
            if pays
            else "slicing the model reduces latency for no batch size beyond the spread"
        ),
    )


def _weights(served: ServingMeasurements) -> Finding:
    table = served.memory()
    parts = [f"{way} {bytes_text(most)}" for way, most in table["most_weights_bytes"].items()]
    return Finding("Bytes of weights on the rank that stores most", details=(", ".join(parts),))


def _differences(served: ServingMeasurements) -> Finding:
    largest = max(served.differences.values())
    details = (
        f"the largest difference of a prediction is {largest:.1e}; rounding explains up to "
        f"{served.allowed:.1e}"
    )
    return Finding(
        "All strategies return the same predictions as one process, except for rounding",
        details=(details,),
    )


def _best_by_network(
    networks: list[str], lowest_latencies: list[Finding], highest_throughputs: list[Finding]
) -> Finding:
    """Return a finding about the best configurations on each network."""
    pairs = [
        f"{network}: {_winner(first)} and {_winner(most)}"
        for network, first, most in zip(
            networks, lowest_latencies, highest_throughputs, strict=True
        )
    ]
    return Finding("Lowest latency and highest throughput by network", details=(*pairs,))


ORIGINAL = "original"
LEVEL = 0.05  # significance level of the sign test that compares accuracies
WORTH = 1.02  # File sizes count as equal if their ratio is below this value.

Row: TypeAlias = dict[str, Any]  # a row of the table that `labkit.deployment.compare` returns


def deployment(table: pd.DataFrame) -> Figure:
    """Draw accuracy over file size and over inference time, with one marker per method.

    The shape of a marker identifies the family of the method. In both panels, the best methods are
    at the upper left. Whiskers show the range over repeats. A remark names the methods that do not
    support the model.

    Args:
        table: Table with one row per method, the result of `labkit.deployment.compare`.
    """
    rows = _measured(table)
    shown = _lines(rows)
    panels = _panels(table[table["bytes"].notna()], shown)
    refused = [name for name, row in _rows(table).items() if row["bytes"] != row["bytes"]]
    remark = f"methods that cannot compress this model: {', '.join(refused)}" if refused else ""
    title = f"Compression of a trained model, {len(rows) - 1} methods · wall clock · 1 process"
    words = "; ".join(
        f"{name}: test accuracy {row['accuracy']:.1%}, {bytes_text(row['bytes'])}, "
        f"{row['time_ratio']:.3g} times the original's inference time"
        for name, row in rows.items()
    )
    return sheet([panels], shown.values(), title, [remark], [words], plot=300)


def summarize_deployment(table: pd.DataFrame) -> Markdown:
    """Summarize each method's accuracy, size and time, and the smallest file of equal accuracy."""
    rows = _rows(table)
    original = rows[ORIGINAL]
    findings = [
        f"**{ORIGINAL}**: accuracy {original['accuracy']:.1%} on {original['test_answers']:.0f} "
        f"test samples, {bytes_text(original['bytes'])} on disk, {original['inference_ms']:.3g} "
        f"ms for a batch of {original['batch_size']:.0f}"
    ]
    others = {name: row for name, row in _measured(table).items() if name != ORIGINAL}
    for name, row in rows.items():
        if name in others:
            parts = (row["what"], _accuracy(row), _bytes(row), _time(row))
            findings.append(f"**{name}**: {'; '.join(parts)}")
        elif name != ORIGINAL:
            findings.append(f"**{name}**: this method cannot compress the model. {row['what']}")
    return sentences(map(Finding, [*findings, *_conclusions(others)]))


def _accuracy(row: Row) -> str:
    details = f"accuracy {row['accuracy']:.1%}"
    if not row["lost"] + row["gained"]:
        return f"{details}, correct on the same samples as the original"
    details = f"{details}, {row['lost']:.0f} correct answers lost and {row['gained']:.0f} gained"
    if row["chance"] >= LEVEL:
        return f"{details}, a difference that chance may explain (p = {row['chance']:.2g})"
    return f"{details}, {'better' if row['gained'] > row['lost'] else 'worse'} beyond chance"


def _bytes(row: Row) -> str:
    text = f"{bytes_text(row['bytes'])}, {_ratio_text(row['smaller'], 'smaller', 'larger')}"
    if row["file"].endswith(".keras"):
        return text
    # The text also states the size of the .keras file after gzip. The comparison shows how much
    # gzip saves without any other compression.
    return (
        f"{text}; for comparison, its .keras file compressed by gzip: "
        f"{bytes_text(row['keras_gzip_bytes'])}"
    )


def _time(row: Row) -> str:
    spread = f"{row['time_ratio_low']:.2f} to {row['time_ratio_high']:.2f}"
    details = f"{row['time_ratio']:.2f}x the original's inference time (repeats {spread})"
    if _faster(row):
        return f"{details}: faster"
    if row["time_ratio_low"] > 1:
        return f"{details}: slower"
    return f"{details}: no difference beyond the spread"


def _conclusions(others: dict[str, Row]) -> list[str]:
    lines = []
    if trained := [name for name, row in others.items() if row["extra_epochs"]]:
        lines.append(
            f"Methods that trained longer than the original: {', '.join(trained)}. Longer "
            "training may explain a gain in accuracy"
        )
    faster = [name for name, row in others.items() if _faster(row)]
    lines.append(
        "Methods with faster inference than the original, beyond the spread: "
        f"{', '.join(faster) or 'none'}"
    )
    lossless = {
        name: row for name, row in others.items() if _without_loss(row) and row["smaller"] > WORTH
    }
    if not lossless:
        return [
            *lines,
            "Every method with a smaller file has lost more accuracy than chance explains",
        ]
    best = min(lossless, key=lambda name: lossless[name]["bytes"])
    return [
        *lines,
        f"Method with the smallest file that has no significant loss of accuracy: **{best}** "
        f"({lossless[best]['lost']:.0f} correct answers lost, {lossless[best]['gained']:.0f} "
        f"gained), {lossless[best]['smaller']:.3g}x smaller than the original",
    ]


def _without_loss(row: Row) -> bool:
    """Whether the sign test shows no significant loss of accuracy."""
    return bool(row["gained"] >= row["lost"] or row["chance"] >= LEVEL)


def _faster(row: Row) -> bool:
    return bool(row["time_ratio_high"] < 1)


def _ratio_text(ratio: float, more: str, less: str) -> str:
    if 1 / WORTH <= ratio <= WORTH:
        return "as large (within 2 %)"
    return f"{ratio:.3g}x {more}" if ratio > 1 else f"{1 / ratio:.3g}x {less}"


def _rows(table: pd.DataFrame) -> dict[str, Row]:
    return dict(zip(map(str, table.index), table.to_dict("records"), strict=True))


def _measured(table: pd.DataFrame) -> dict[str, Row]:
    # If a method does not support the model, its number of bytes is NaN. NaN does not equal itself,
    # so the condition omits rows without a number of bytes.
    return {name: row for name, row in _rows(table).items() if row["bytes"] == row["bytes"]}


def _lines(rows: dict[str, Row]) -> dict[str, LineStyle]:
    """Return line styles: one symbol per family of methods, and one colour per method."""
    members: dict[str, list[str]] = {}
    for name, row in rows.items():
        members.setdefault(row["family"], []).append(name)
    return {
        name: LineStyle(
            label=name,
            color=PALETTE[names.index(name) % len(PALETTE)],
            dash="solid",
            symbol=SYMBOLS[place % len(SYMBOLS)],
        )
        for place, names in enumerate(members.values())
        for name in names
    }


def _panels(table: pd.DataFrame, shown: dict[str, LineStyle]) -> list[Panel]:
    """Return two panels: accuracy over file size, and accuracy over inference time."""
    rows = table.assign(run=table.index.map(str), hover=[*map(_hover, table.to_dict("records"))])
    batch, right = rows["batch_size"].iloc[0], ("test accuracy", dict(SHARES))
    return [
        Panel(
            title="File size\nsize of the file that is loaded for inference",
            x="bytes on disk",
            y=right[0],
            traces=points_with_bars(rows, "bytes", "accuracy", shown, size=11),
            x_axis=bytes_axis(0.8 * rows["bytes"].min(), 1.25 * rows["bytes"].max()),
            y_axis=right[1],
        ),
        Panel(
            title="Inference time\nwhisker: range of the repeats",
            x=f"time of a batch of {batch:.0f} samples, relative to the original",
            y=right[0],
            traces=points_with_bars(rows, "time_ratio", "accuracy", shown, size=11),
            x_axis={"rangemode": "tozero"},
            y_axis=right[1],
        ),
    ]


def _hover(row: Row) -> str:
    return (
        f"test accuracy {row['accuracy']:.2%}<br>{bytes_text(row['bytes'])}, "
        f"{row['smaller']:.3g}x smaller<br>{row['inference_ms']:.3g} ms, "
        f"{row['time_ratio']:.2f}x the time of the original"
    )
