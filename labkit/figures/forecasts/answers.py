"""Answers in sentences and tables: how far it scales, what pays, how far forecasts are off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bits_text, bytes_text, number_text, plural, seconds_text
from labkit.figures.forecasts.winners import GAIN, winners_findings
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.forecast import Calibration, Forecast, Source
from labkit.forecast.study import Place, Study
from labkit.records.run import Run
from labkit.records.verdict import arrivals

if TYPE_CHECKING:
    import pandas as pd

    from labkit.strategies import Strategy

Inputs = Mapping[str, Sequence[Run]]  # runs with the "real" and the "synthetic" input
FAST, PROMPT = 1e10 / 8, 1e-4  # bytes/s from which, and s up to which a network counts as fast


def sources_table(sources: Sequence[Source]) -> pd.DataFrame:
    """A row a figure: what it is, and where it is from."""
    import pandas as pd

    return pd.DataFrame(list(sources), columns=["figure", "from"])


def codec_table(calibration: Calibration) -> pd.DataFrame:
    """A row a compressor and size: encode and decode, ms, payload, and the ratio of bytes."""
    import pandas as pd

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
    """By name, the steps in which each seed has come to an accuracy, in order.

    A name of which a seed has not come there is left out.
    """
    found = {name: list(arrivals(run, target).values()) for name, run in trained.items()}
    return {
        name: sorted(each.step for each in seeds if each is not None)
        for name, seeds in found.items()
        if None not in seeds
    }


def steps_table(trained: Mapping[str, Run], target: float) -> pd.DataFrame:
    """A row a name: the seeds that have come to an accuracy, and the steps that they needed."""
    import pandas as pd

    rows = []
    for name, run in trained.items():
        seeds = arrivals(run, target)
        steps = [each.step for each in seeds.values() if each is not None]
        median = float(np.median(steps)) if steps else np.nan
        rows.append((name, f"{len(steps)} of {len(seeds)}", median, *_ends(steps)))
    return pd.DataFrame(rows, columns=["way", "seeds", "steps, median", "least", "most"])


def verified_table(predicted: Mapping[str, Forecast], runs: Mapping[str, Run]) -> pd.DataFrame:
    """A row a run: predicted and measured step, ms, and how far the prediction is off."""
    import pandas as pd

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
    """How many workers are worth it, how many servers, what a slow rank and real input cost.

    Args:
        study: on machines like the measured one.
        strategies: by name.
        efficiency: below which more workers are not worth it.
        slow: how many times as long one rank computes.
        servers: by workers, how many servers are within 5 % of the fastest of a sweep.
        inputs: runs with "real" and "synthetic" input.
    """
    found = []
    for name, way in strategies.items():
        last = study.workers_until(efficiency, strategy=way)
        said = "at 10,000 still above it" if last is None else f"up to {plural(last, 'worker')}"
        found.append(Finding(f"**{name}** keeps an efficiency of {efficiency:.0%}", said=(said,)))
    for workers, count in servers.items():
        said = f"{plural(count, 'server')} within 5 % of the fastest of the sweep"
        found.append(Finding(f"{plural(workers, 'worker')} with parameter servers", said=(said,)))
    first, way = next(iter(strategies.items()))
    for workers in (2, 16):
        cost = study.slow_rank(slow, workers, way)
        head = f"One of {workers} ranks that computes {slow:g} times as long makes a step longer by"
        found.append(Finding(head, first, cost, text="{:.0%}".format))
    found += _of_input(inputs)
    ahead = study.at(max(2, study.experiment.workers), strategy=way)
    for what, value in (("Price", ahead.money), ("Energy, J", ahead.energy)):
        if value is not None:
            head = f"{what} to the target with {plural(ahead.workers, 'worker')}"
            found.append(Finding(head, first, value, text=number_text))
    return sentences(found)


def break_even_reading(
    places: Sequence[Place],
    usual: str,
    compressed: Sequence[str],
    predicted: Mapping[str, Forecast],
    runs: Mapping[str, Run],
    reached: Sequence[Place] = (),
) -> Markdown:
    """First whether compression pays on fast networks; then who does where; then how sure that is.

    Args:
        places: of `Study.map`.
        usual: the way that others are held against.
        compressed: the ways that compress.
        predicted, runs: some places, forecast and run.
        reached: the places with times to a target.
    """
    fast = [each for each in places if each.bandwidth >= FAST and each.latency <= PROMPT]
    found = [*_null(fast, usual, compressed), *winners_findings(places, usual)]
    if reached:
        found += winners_findings(reached, usual)
    table = verified_table(predicted, runs)
    for row in table.to_dict("records"):
        said = f"predicted {row['predicted, ms']:.3g} ms, measured {row['measured, ms']:.3g} ms"
        found.append(Finding(f"Run: **{row['run']}**", said=(said, f"off by {row['error']:+.0%}")))
    return sentences(found)


def _null(fast: Sequence[Place], usual: str, compressed: Sequence[str]) -> Iterator[Finding]:
    """Of all compressors in all places on fast networks, how many save anything."""
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
            said=(f"{gains} of {len(pairs)}",),
        )


def _of_input(inputs: Inputs) -> Iterator[Finding]:
    if {"real", "synthetic"} <= inputs.keys():
        real, made = (
            float(np.median([run.metrics["step_ms"]["median"] for run in inputs[name]]))
            for name in ("real", "synthetic")
        )
        said = f"{seconds_text(real / 1e3)} and {seconds_text(made / 1e3)} a step"
        text = "{:+.1%}".format
        yield Finding("Real input beside synthetic", "", real / made - 1, text=text, said=(said,))


def _said(compressor: Mapping[str, object]) -> str:
    """`ErrorFeedback(TopK)`"""
    inner = compressor.get("inner")
    name = str(compressor["name"])
    return f"{name}({_said(inner)})" if isinstance(inner, Mapping) else name


def _ends(steps: Sequence[int]) -> tuple[float, float]:
    return (float(min(steps)), float(max(steps))) if steps else (np.nan, np.nan)
