"""Fastest strategies by bandwidth, latency and workers, and summaries of a scaling study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.common.units import bits_text, bytes_text, number_text, plural, seconds_text
from labkit.figures.kit.entries import PALETTE, Finding, Markdown, safe_text, sentences
from labkit.figures.kit.marks import cells, step_colors
from labkit.figures.kit.panels import Trace
from labkit.forecast import Calibration, Forecast, Provenance
from labkit.forecast.study import MapPoint, Study
from labkit.records.run import Run
from labkit.records.verdict import arrivals

if TYPE_CHECKING:
    from labkit.figures.kit.frames import Animation
    from labkit.strategies import Strategy

GAIN = 0.05  # A strategy counts as faster if it saves at least this fraction of the reference time.
APART = "not distinguishable"
UNSURE = "#BBBBBB"  # colour of map cells in which no strategy is clearly the fastest
BANDS = (
    "Times are medians over seeds; bands reach from the seed with the fewest steps to the seed "
    "with the most steps. A strategy is fastest if its slowest seed is faster than the fastest "
    "seed of every other strategy"
)
# The constant `CELL` is the height of a map row in pixels. The constant `AXIS` is the height in
# pixels of the axis above the map.
CELL, AXIS = 34, 56


def winners_table(places: Iterable[MapPoint], usual: str) -> pd.DataFrame:
    """Return the fastest strategy and its gain for each latency, worker count and bandwidth.

    `gain` is the fraction of the reference strategy's time that the winner saves. If the gain is
    below 5 %, the reference strategy counts as the winner. If times have ranges over seeds, the
    winner's slowest seed is compared. A strategy wins only if its slowest seed beats every seed of
    other strategies. A winner must save at least 5 % of the reference strategy's time. The
    reference strategy itself can win without a saving of 5 %. If no strategy is a clear winner, the
    winner is "not distinguishable".

    Raises:
        InvalidInput: The reference strategy `usual` is not on the map.
    """
    rows = []
    for place in places:
        if usual not in place.seconds:
            raise InvalidInput(
                f"the reference strategy usual={usual!r} is not on this "
                f"map{listed(usual, place.seconds)}"
            )
        winner, gain = _winner(place, usual)
        times = ", ".join(_time(place, name) for name in place.seconds)
        where = f"{place.workers:,} workers, {bits_text(place.bandwidth)}"
        where += f", {seconds_text(place.latency)}" + f": {APART}" * (winner == APART)
        rows.append(
            {"latency": place.latency, "workers": place.workers, "bandwidth": place.bandwidth}
            | {"winner": winner, "gain": gain, "hover": safe_text(f"{where}: {times}")}
        )
    return pd.DataFrame(rows)


def winners_map(places: Sequence[MapPoint], usual: str, of: str, subtitle: str = "") -> Animation:
    """Draw a map of the fastest strategy per setting, and of the fraction of time that it saves.

    On the map, bandwidth increases to the right and the number of workers upwards. A slider selects
    the latency for which the map is shown. A strategy counts as faster if it saves at least 5 % of
    the reference strategy's time. Its range over seeds must also overlap no other strategy's range.

    Args:
        places: Map points from `Study.map`: the times of all strategies for each latency, worker
            count and bandwidth.
        usual: Name of the reference strategy, against which savings are computed.
        of: Description of the trained model.
        subtitle: Further information, for example about the machines.
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
        # The x axis is above the map, because the buttons and the slider are below the map.
        "xaxis": {"title": "bandwidth of a link", "type": "category", "side": "top"},
        "yaxis": {"title": "workers", "type": "category", "domain": [0, 1 - AXIS / height]},
    }
    squares = legend([(safe_text(name), color, "square") for name, color in looks.items()])
    title = f"Fastest way · forecast · {of}"
    findings = winners_findings(places, usual)
    alt = ". ".join(
        [title, subtitle, *[BANDS] * banded, *(finding.sentence for finding in findings)]
    )
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


def summarize_winners(places: Sequence[MapPoint], usual: str) -> Markdown:
    """State how often each strategy is faster than the reference, and how much time it saves."""
    return sentences(winners_findings(places, usual))


def winners_findings(places: Sequence[MapPoint], usual: str) -> list[Finding]:
    """Return findings: where a strategy is faster than the reference, and its largest gain."""
    table, banded = winners_table(places, usual), places[0].bands is not None
    gains = table[~table["winner"].isin([usual, APART])]
    head = f"strategy other than **{usual}** saves at least {GAIN:.0%} of the time in"
    head = f"To reach the target, with any seed, a {head}" if banded else f"A {head}"
    findings = [Finding(head, details=(f"{len(gains)} of {len(table)} places",))]
    if banded:
        unsure = int((table["winner"] == APART).sum())
        head = (
            f"To reach the target, strategies are {APART}, because their bands overlap or the "
            "saving is small, in"
        )
        findings.append(Finding(head, details=(f"{unsure} of {len(table)} places",)))
    for name, group in gains.groupby("winner", sort=False):
        top = group.loc[group["gain"].idxmax()]
        most = f"{top['workers']:,} workers, {bits_text(top['bandwidth'])}, "
        details = f"largest gain at {most}{seconds_text(top['latency'])}: {top['gain']:.0%}"
        findings.append(
            Finding(f"**{name}** is fastest in", details=(f"{len(group)} of them", details))
        )
    return findings


def _winner(place: MapPoint, usual: str) -> tuple[str, float]:
    """Return the fastest strategy at a map point, and the fraction of reference time it saves."""
    best = min(place.seconds, key=lambda name: place.seconds[name])
    gain = 1 - place.seconds[best] / place.seconds[usual]
    if place.bands is None:
        return best if gain >= GAIN else usual, gain
    quickest = min((low for n, (low, _) in place.bands.items() if n != best), default=np.inf)
    sure = place.bands[best][1] < quickest and (best == usual or gain >= GAIN)
    return (best, gain) if sure else (APART, 0.0)


def _time(place: MapPoint, name: str) -> str:
    """Format a strategy's time and the range of times over seeds."""
    details = f"{name} {seconds_text(place.seconds[name])}"
    if place.bands is None:
        return details
    low, high = place.bands[name]
    band = (
        f"{seconds_text(low)} to {seconds_text(high)}"
        if high < np.inf
        else "only one seed, so no band"
    )
    return f"{details} ({band})"


def _cells(
    group: pd.DataFrame, looks: Mapping[str, str], bandwidths: list[float], workers: list[int]
) -> Trace:
    """Return the heat map for one latency: one cell per bandwidth and number of workers."""
    by: Mapping[tuple[int, float], Mapping[str, object]] = {
        (row["workers"], row["bandwidth"]): row for row in group.to_dict("records")
    }
    rows = [[by[count, bandwidth] for bandwidth in bandwidths] for count in workers]
    names = list(looks)
    heat = cells(
        [[names.index(str(cell["winner"])) for cell in row] for row in rows],
        [bits_text(bandwidth) for bandwidth in bandwidths],
        [f"{count:,}" for count in workers],
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


Inputs = Mapping[str, Sequence[Run]]  # `Inputs` groups runs by their input, "real" or "synthetic".
# A fast link has a bandwidth of at least `FAST` (bytes/s). The latency of a fast link is at most
# `PROMPT` (s).
FAST, PROMPT = 1e10 / 8, 1e-4


def sources_table(sources: Sequence[Provenance]) -> pd.DataFrame:
    """Return a table of all numbers that a forecast uses, with a name and a source for each."""
    return pd.DataFrame(list(sources), columns=["figure", "from"])


def codec_table(calibration: Calibration) -> pd.DataFrame:
    """Return a row per compressor and gradient size: codec times, payload, compression ratio."""
    return pd.DataFrame(
        {
            "compressor": _compressor_name(codec.compressor),
            "gradient": bytes_text(codec.nbytes),
            "encode, ms": 1e3 * codec.encode.median,
            "decode, ms": 1e3 * codec.decode.median,
            "payload": bytes_text(codec.payload),
            "ratio": codec.nbytes / max(codec.payload, 1),
        }
        for codec in calibration.codecs
    )


def steps_to(trained: Mapping[str, Run], target: float) -> dict[str, list[int]]:
    """Return, for each run name, the sorted steps at which the run's seeds reached the target.

    Runs are omitted if one of their seeds missed the target.
    """
    by_seed = {name: list(arrivals(run, target).values()) for name, run in trained.items()}
    return {
        name: sorted(arrival.step for arrival in seeds if arrival is not None)
        for name, seeds in by_seed.items()
        if None not in seeds
    }


def steps_table(trained: Mapping[str, Run], target: float) -> pd.DataFrame:
    """Return a row per run: how many seeds reached the target, and after how many steps."""
    rows = []
    for name, run in trained.items():
        seeds = arrivals(run, target)
        steps = [arrival.step for arrival in seeds.values() if arrival is not None]
        median = float(np.median(steps)) if steps else np.nan
        rows.append((name, f"{len(steps)} of {len(seeds)}", median, *_ends(steps)))
    return pd.DataFrame(rows, columns=["way", "seeds", "steps, median", "least", "most"])


def verified_table(predicted: Mapping[str, Forecast], runs: Mapping[str, Run]) -> pd.DataFrame:
    """Return a row per run: predicted step (ms), measured step (ms), and predicted/measured - 1."""
    rows = []
    for name, run in runs.items():
        forecast, step = predicted[name], run.metrics["step_ms"]
        low, high = (1e3 * seconds for seconds in forecast.interval)
        measured = 1e3 * forecast.rows / run.metrics["samples_per_second"]
        rows.append(
            {"run": name, "predicted, ms": 1e3 * forecast.seconds, "low": low, "high": high}
            | {"measured, ms": measured, "p10": step["p10"], "p90": step["p90"]}
            | {"error": 1e3 * forecast.seconds / measured - 1}
        )
    return pd.DataFrame(rows)


def summarize_study(
    study: Study,
    strategies: Mapping[str, Strategy],
    efficiency: float,
    slow: float,
    servers: Mapping[int, int],
    inputs: Inputs,
) -> Markdown:
    """Summarize efficient numbers of workers and servers, and costs of a slow rank and real data.

    Args:
        study: Scaling study for machines that are like the measured machine.
        strategies: Strategies to forecast, by name.
        efficiency: Parallel efficiency (0 to 1) below which more workers are not worth their cost.
        slow: Factor by which one rank computes more slowly than the other ranks.
        servers: For each number of workers, a number of parameter servers. Its time is within 5 %
            of the shortest time in a sweep.
        inputs: Runs to compare by the kind of their input, with the keys "real" and "synthetic".
    """
    findings = []
    for name, way in strategies.items():
        last = study.workers_until(efficiency, strategy=way)
        details = "beyond 10,000 workers" if last is None else f"up to {plural(last, 'worker')}"
        findings.append(
            Finding(f"**{name}** keeps an efficiency of {efficiency:.0%}", details=(details,))
        )
    for workers, count in servers.items():
        details = f"{plural(count, 'server')} within 5 % of the fastest time in the sweep"
        findings.append(
            Finding(f"{plural(workers, 'worker')} with parameter servers", details=(details,))
        )
    first, way = next(iter(strategies.items()))
    for workers in (2, 16):
        cost = study.slow_rank(slow, workers, way)
        head = (
            f"Increase of the step time if one of {workers} ranks computes {slow:g} times as long"
        )
        findings.append(Finding(head, first, cost, text="{:.0%}".format))
    findings += _input_cost(inputs)
    forecast = study.at(max(2, study.experiment.workers), strategy=way)
    for what, value in (("Price", forecast.cost), ("Energy, J", forecast.energy)):
        if value is not None:
            head = f"{what} to reach the target with {plural(forecast.workers, 'worker')}"
            findings.append(Finding(head, first, value, text=number_text))
    return sentences(findings)


def summarize_break_even(
    places: Sequence[MapPoint],
    usual: str,
    compressed: Sequence[str],
    predicted: Mapping[str, Forecast],
    runs: Mapping[str, Run],
    reached: Sequence[MapPoint] = (),
) -> Markdown:
    """Summarize gains from compression on fast networks, fastest strategies, and forecast errors.

    Args:
        places: Map points from `Study.map`: the times of all strategies for each latency, worker
            count and bandwidth.
        usual: Name of the reference strategy, against which savings are computed.
        compressed: Names of the strategies with compression.
        predicted, runs: Forecasts and measured runs. A forecast and a run with the same name have
            the same settings.
        reached: Map points that contain times to a target accuracy; default: none.
    """
    fast = [place for place in places if place.bandwidth >= FAST and place.latency <= PROMPT]
    findings = [*_compression_gain(fast, usual, compressed), *winners_findings(places, usual)]
    if reached:
        findings += winners_findings(reached, usual)
    table = verified_table(predicted, runs)
    for row in table.to_dict("records"):
        details = f"predicted {row['predicted, ms']:.3g} ms, measured {row['measured, ms']:.3g} ms"
        findings.append(
            Finding(f"Run: **{row['run']}**", details=(details, f"error {row['error']:+.0%}"))
        )
    return sentences(findings)


def _compression_gain(
    fast: Sequence[MapPoint], usual: str, compressed: Sequence[str]
) -> Iterator[Finding]:
    """Yield findings about the settings with fast networks in which compression saves time."""
    pairs = [
        1 - seconds / place.seconds[usual]
        for place in fast
        for name, seconds in place.seconds.items()
        if name in compressed
    ]
    if pairs:
        gains = sum(gain >= GAIN for gain in pairs)
        yield Finding(
            f"Settings with compression on links of at least {bits_text(FAST)} that save at "
            f"least {GAIN:.0%} of the time of **{usual}**",
            details=(f"{gains} of {len(pairs)}",),
        )


def _input_cost(inputs: Inputs) -> Iterator[Finding]:
    if {"real", "synthetic"} <= inputs.keys():
        real, synthetic = (
            float(np.median([run.metrics["step_ms"]["median"] for run in inputs[name]]))
            for name in ("real", "synthetic")
        )
        details = f"{seconds_text(real / 1e3)} and {seconds_text(synthetic / 1e3)} per step"
        text = "{:+.1%}".format
        yield Finding(
            "Real input compared with synthetic input",
            "",
            real / synthetic - 1,
            text=text,
            details=(details,),
        )


def _compressor_name(compressor: Mapping[str, object]) -> str:
    """Name a compressor and its inner compressor, such as `ErrorFeedback(TopK)`."""
    inner = compressor.get("inner")
    name = str(compressor["name"])
    return f"{name}({_compressor_name(inner)})" if isinstance(inner, Mapping) else name


def _ends(steps: Sequence[int]) -> tuple[float, float]:
    return (float(min(steps)), float(max(steps))) if steps else (np.nan, np.nan)
