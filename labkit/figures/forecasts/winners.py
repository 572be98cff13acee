"""Fastest methods over bandwidth, latency and workers, and answers of a scaling study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.common.units import bits_text, bytes_text, number_text, plural, seconds_text
from labkit.figures.kit.entries import PALETTE, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import cells, step_colors
from labkit.figures.kit.panels import Trace
from labkit.forecast import Calibration, Forecast, Source
from labkit.forecast.study import Place, Study
from labkit.records.run import Run
from labkit.records.verdict import arrivals

if TYPE_CHECKING:
    from labkit.figures.kit.frames import Animation
    from labkit.strategies import Strategy

GAIN = 0.05  # of the time of the way that is held against: less is no gain
APART = "not told apart"
UNSURE = "#BBBBBB"  # the colour of places where that is so
BANDS = (
    "A time is that of the median of seeds, its band from the seed of fewest steps to that of "
    "most; a way is fastest where its slowest seed is ahead of the quickest of all others"
)
CELL, AXIS = 34, 56  # pixels of a row, and of the axis above


def winners_table(places: Iterable[Place], usual: str) -> pd.DataFrame:
    """Return a row a place: latency, workers, bandwidth, the fastest way, and its gain.

    `gain` is the share of the usual way's time that is saved; where it is below 5 %, the usual way
    counts as the winner. Where times have bands, a winner is surely faster: its band ends before
    all others begin, and another way than the usual one saves so much, too; else nobody is told
    apart.

    Raises: InvalidInput, where the usual way is not among those of the map.
    """
    rows = []
    for place in places:
        if usual not in place.seconds:
            raise InvalidInput(f"usual={usual!r} is not on this map{listed(usual, place.seconds)}")
        winner, gain = _winner(place, usual)
        times = ", ".join(_time(place, name) for name in place.seconds)
        where = f"{place.workers:,} workers, {bits_text(place.bandwidth)}"
        where += f", {seconds_text(place.latency)}" + f": {APART}" * (winner == APART)
        rows.append(
            {"latency": place.latency, "workers": place.workers, "bandwidth": place.bandwidth}
            | {"winner": winner, "gain": gain, "hover": safe_text(f"{where}: {times}")}
        )
    return pd.DataFrame(rows)


def winners_map(places: Sequence[Place], usual: str, of: str, where: str = "") -> Animation:
    """Draw cells in the colour of the fastest way, with the share of time that it saves.

    Bandwidth runs to the right, workers upwards, latency by the slider. A way that saves less than
    5 % of the usual one's time does not count as faster, nor one whose band of seeds reaches into
    another's.

    Args:
        places: of `Study.map`.
        usual: the way that others are held against.
        of: the trained model in words.
        where: further facts on the machines.
    """
    from labkit.figures.kit.canvas import HEAD
    from labkit.figures.kit.frames import CONTROLS, LEGEND, animation, legend

    names, banded = list(places[0].seconds), places[0].bands is not None
    looks = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}
    looks |= {APART: UNSURE} if banded else {}
    table = winners_table(places, usual)
    latencies = list(dict.fromkeys(table["latency"]))
    bandwidths, workers = (list(dict.fromkeys(table[c])) for c in ("bandwidth", "workers"))
    states = [
        [_cells(table[table["latency"] == latency], looks, bandwidths, workers)]
        for latency in latencies
    ]
    height = CELL * len(workers) + AXIS
    layout: Trace = {
        "height": height,
        "margin": {"t": HEAD, "b": LEGEND + CONTROLS, "l": 76, "r": 16, "pad": 0},
        # Above, for buttons and slider are below.
        "xaxis": {"title": "bandwidth of a link", "type": "category", "side": "top"},
        "yaxis": {"title": "workers", "type": "category", "domain": [0, 1 - AXIS / height]},
    }
    squares = legend([(safe_text(name), color, "square") for name, color in looks.items()])
    title = f"Who is fastest · forecast · {of}"
    findings = winners_findings(places, usual)
    alt = ". ".join([title, where, *[BANDS] * banded, *(each.sentence for each in findings)])
    rows = table.drop(columns="hover").assign(
        latency=table["latency"].map(seconds_text),
        bandwidth=table["bandwidth"].map(bits_text),
        gain=table["gain"].map("{:.0%}".format),
    )
    return animation(
        squares,
        states,
        layout,
        title,
        alt,
        rows.to_html(index=False),
        "latency ",
        names=[*map(seconds_text, latencies)],
    )


def winners_reading(places: Sequence[Place], usual: str) -> Markdown:
    """Say in how many places another way gains, which one, and where most."""
    return sentences(winners_findings(places, usual))


def winners_findings(places: Sequence[Place], usual: str) -> list[Finding]:
    """Return findings on the places where another way gains, and where most."""
    table, banded = winners_table(places, usual), places[0].bands is not None
    gains = table[~table["winner"].isin([usual, APART])]
    head = f"nother way than **{usual}** saves at least {GAIN:.0%} of the time in"
    head = f"To the target, whatever the seed, a{head}" if banded else f"A{head}"
    findings = [Finding(head, details=(f"{len(gains)} of {len(table)} places",))]
    if banded:
        unsure = int((table["winner"] == APART).sum())
        head = f"To the target, ways are {APART}, as bands of seeds overlap or little is saved, in"
        findings.append(Finding(head, details=(f"{unsure} of {len(table)} places",)))
    for name, group in gains.groupby("winner", sort=False):
        top = group.loc[group["gain"].idxmax()]
        most = f"{top['workers']:,} workers, {bits_text(top['bandwidth'])}, "
        details = f"most at {most}{seconds_text(top['latency'])}: {top['gain']:.0%}"
        findings.append(
            Finding(f"**{name}** is fastest in", details=(f"{len(group)} of them", details))
        )
    return findings


def _winner(place: Place, usual: str) -> tuple[str, float]:
    """Return the fastest way in a place, and its gain."""
    best = min(place.seconds, key=lambda name: place.seconds[name])
    gain = 1 - place.seconds[best] / place.seconds[usual]
    if place.bands is None:
        return best if gain >= GAIN else usual, gain
    quickest = min((low for n, (low, _) in place.bands.items() if n != best), default=np.inf)
    sure = place.bands[best][1] < quickest and (best == usual or gain >= GAIN)
    return (best, gain) if sure else (APART, 0.0)


def _time(place: Place, name: str) -> str:
    """Return the time of a way in a place, with its band."""
    details = f"{name} {seconds_text(place.seconds[name])}"
    if place.bands is None:
        return details
    low, high = place.bands[name]
    band = f"{seconds_text(low)} to {seconds_text(high)}" if high < np.inf else "one seed, no band"
    return f"{details} ({band})"


def _cells(
    group: pd.DataFrame, looks: Mapping[str, str], bandwidths: list[float], workers: list[int]
) -> Trace:
    """Return one frame: a cell a place."""
    by: Mapping[tuple[int, float], Mapping[str, object]] = {
        (row["workers"], row["bandwidth"]): row for row in group.to_dict("records")
    }
    rows = [[by[count, each] for each in bandwidths] for count in workers]
    names = list(looks)
    heat = cells(
        [[names.index(str(cell["winner"])) for cell in row] for row in rows],
        [bits_text(each) for each in bandwidths],
        [f"{each:,}" for each in workers],
        step_colors([*looks.values()] if len(names) > 1 else [*looks.values()] * 2),
        max(len(names) - 1, 1),
        "%{customdata}",
        gap=2,
    )
    texts = [
        ["≈" if cell["winner"] == APART else f"{cell['gain']:.0%}" for cell in row] for row in rows
    ]
    hover = [[cell["hover"] for cell in row] for row in rows]
    return heat | {"text": texts, "texttemplate": "%{text}", "customdata": hover}


Inputs = Mapping[str, Sequence[Run]]  # runs with the "real" and the "synthetic" input
FAST, PROMPT = 1e10 / 8, 1e-4  # bytes/s from which, and s up to which a network counts as fast


def sources_table(sources: Sequence[Source]) -> pd.DataFrame:
    """Return a row a figure: its name, and its source."""
    return pd.DataFrame(list(sources), columns=["figure", "from"])


def codec_table(calibration: Calibration) -> pd.DataFrame:
    """Return a row a compressor and size: encode and decode in ms, payload, and ratio of bytes."""
    return pd.DataFrame(
        {
            "compressor": _said(each.compressor),
            "gradient": bytes_text(each.nbytes),
            "encode, ms": 1e3 * each.encode.median,
            "decode, ms": 1e3 * each.decode.median,
            "payload": bytes_text(each.payload),
            "ratio": each.nbytes / max(each.payload, 1),
        }
        for each in calibration.codecs
    )


def steps_to(trained: Mapping[str, Run], target: float) -> dict[str, list[int]]:
    """Return by name the steps in which each seed reached an accuracy, in order.

    A name of which a seed has not come there is left out.
    """
    by_seed = {name: list(arrivals(run, target).values()) for name, run in trained.items()}
    return {
        name: sorted(each.step for each in seeds if each is not None)
        for name, seeds in by_seed.items()
        if None not in seeds
    }


def steps_table(trained: Mapping[str, Run], target: float) -> pd.DataFrame:
    """Return a row a name: the number of seeds that reached an accuracy, and their steps."""
    rows = []
    for name, run in trained.items():
        seeds = arrivals(run, target)
        steps = [each.step for each in seeds.values() if each is not None]
        median = float(np.median(steps)) if steps else np.nan
        rows.append((name, f"{len(steps)} of {len(seeds)}", median, *_ends(steps)))
    return pd.DataFrame(rows, columns=["way", "seeds", "steps, median", "least", "most"])


def verified_table(predicted: Mapping[str, Forecast], runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return a row a run: predicted and measured step in ms, and the error."""
    rows = []
    for name, run in runs.items():
        ahead, step = predicted[name], run.metrics["step_ms"]
        low, high = (1e3 * each for each in ahead.interval)
        measured = 1e3 * ahead.rows / run.metrics["samples_per_second"]
        rows.append(
            {"run": name, "predicted, ms": 1e3 * ahead.seconds, "low": low, "high": high}
            | {"measured, ms": measured, "p10": step["p10"], "p90": step["p90"]}
            | {"error": 1e3 * ahead.seconds / measured - 1}
        )
    return pd.DataFrame(rows)


def study_reading(
    study: Study,
    strategies: Mapping[str, Strategy],
    efficiency: float,
    slow: float,
    servers: Mapping[int, int],
    inputs: Inputs,
) -> Markdown:
    """Say how many workers and servers pay, and the cost of a slow rank and of real input.

    Args:
        study: on machines like the measured one.
        strategies: by name.
        efficiency: below which more workers are not worth it.
        slow: how many times as long one rank computes.
        servers: by workers, how many servers are within 5 % of the fastest of a sweep.
        inputs: runs with "real" and "synthetic" input.
    """
    findings = []
    for name, way in strategies.items():
        last = study.workers_until(efficiency, strategy=way)
        details = "at 10,000 still above it" if last is None else f"up to {plural(last, 'worker')}"
        findings.append(
            Finding(f"**{name}** keeps an efficiency of {efficiency:.0%}", details=(details,))
        )
    for workers, count in servers.items():
        details = f"{plural(count, 'server')} within 5 % of the fastest of the sweep"
        findings.append(
            Finding(f"{plural(workers, 'worker')} with parameter servers", details=(details,))
        )
    first, way = next(iter(strategies.items()))
    for workers in (2, 16):
        cost = study.slow_rank(slow, workers, way)
        head = f"One of {workers} ranks that computes {slow:g} times as long makes a step longer by"
        findings.append(Finding(head, first, cost, text="{:.0%}".format))
    findings += _of_input(inputs)
    ahead = study.at(max(2, study.experiment.workers), strategy=way)
    for what, value in (("Price", ahead.money), ("Energy, J", ahead.energy)):
        if value is not None:
            head = f"{what} to the target with {plural(ahead.workers, 'worker')}"
            findings.append(Finding(head, first, value, text=number_text))
    return sentences(findings)


def break_even_reading(
    places: Sequence[Place],
    usual: str,
    compressed: Sequence[str],
    predicted: Mapping[str, Forecast],
    runs: Mapping[str, Run],
    reached: Sequence[Place] = (),
) -> Markdown:
    """Say whether compression pays on fast networks, where each way wins, and the errors.

    Args:
        places: of `Study.map`.
        usual: the way that others are held against.
        compressed: the ways that compress.
        predicted, runs: some places, forecast and run.
        reached: the places with times to a target.
    """
    fast = [each for each in places if each.bandwidth >= FAST and each.latency <= PROMPT]
    findings = [*_null(fast, usual, compressed), *winners_findings(places, usual)]
    if reached:
        findings += winners_findings(reached, usual)
    table = verified_table(predicted, runs)
    for row in table.to_dict("records"):
        details = f"predicted {row['predicted, ms']:.3g} ms, measured {row['measured, ms']:.3g} ms"
        findings.append(
            Finding(f"Run: **{row['run']}**", details=(details, f"off by {row['error']:+.0%}"))
        )
    return sentences(findings)


def _null(fast: Sequence[Place], usual: str, compressed: Sequence[str]) -> Iterator[Finding]:
    """Count the compressors and places on fast networks that save time."""
    pairs = [
        1 - seconds / place.seconds[usual]
        for place in fast
        for name, seconds in place.seconds.items()
        if name in compressed
    ]
    if pairs:
        gains = sum(gain >= GAIN for gain in pairs)
        yield Finding(
            f"From {bits_text(FAST)} on, set-ups with compression that save at least {GAIN:.0%} of "
            f"the time of **{usual}**",
            details=(f"{gains} of {len(pairs)}",),
        )


def _of_input(inputs: Inputs) -> Iterator[Finding]:
    if {"real", "synthetic"} <= inputs.keys():
        real, made = (
            float(np.median([run.metrics["step_ms"]["median"] for run in inputs[name]]))
            for name in ("real", "synthetic")
        )
        details = f"{seconds_text(real / 1e3)} and {seconds_text(made / 1e3)} a step"
        text = "{:+.1%}".format
        yield Finding(
            "Real input beside synthetic", "", real / made - 1, text=text, details=(details,)
        )


def _said(compressor: Mapping[str, object]) -> str:
    """Return `ErrorFeedback(TopK)`."""
    inner = compressor.get("inner")
    name = str(compressor["name"])
    return f"{name}({_said(inner)})" if isinstance(inner, Mapping) else name


def _ends(steps: Sequence[int]) -> tuple[float, float]:
    return (float(min(steps)), float(max(steps))) if steps else (np.nan, np.nan)
