"""How long a step waits for its data: the reading time that exceeds the previous step's time.

Data sets prefetch: a batch is read while ranks train on the previous batch. Calibrated steps use
batches that are already in memory, so their measured times include no reading.
"""

from __future__ import annotations

from dataclasses import replace

from labkit.forecast.calibration import Provenance, Spread
from labkit.forecast.query import Query, StepForecast
from labkit.forecast.time_distributions import NOTHING, interpolate, range_note


def add_input_stall(query: Query, forecast: StepForecast) -> StepForecast:
    """Add the wait for data (`read`): a step takes at least as long as reading its batch."""
    if query.virtual:
        return forecast
    reading = read(query, forecast.rows)
    stall = max(0.0, reading.median - forecast.seconds)
    total = forecast.seconds + stall
    spread = zip(forecast.spread, (reading.low, reading.high), strict=True)
    low, high = (
        max(factor * forecast.seconds, reading_seconds) / total if total else 1.0
        for factor, reading_seconds in spread
    )
    measured = query.model.read
    note = range_note(forecast.rows, measured)
    method = (
        f"measured{note and note + ' rows'}; overlaps with the previous step as far as possible"
    )
    singles = {"step_low": reading.low, "step_high": reading.high}
    source = Provenance("read", method if measured else "not measured: counted as 0 s")
    return replace(
        forecast,
        parts={**forecast.parts, "read": stall},
        spread=(low, high),
        sources=(*forecast.sources, source),
        more={k: max(v, singles.get(k, v)) for k, v in forecast.more.items()},
    )


def seconds_with_input(query: Query, rows: float) -> float:
    """Return the seconds of a single rank's step on `rows` samples, including waits for data."""
    seconds = query.single_rank_seconds(rows)
    return seconds if query.virtual else max(seconds, read(query, rows).median)


def read(query: Query, rows: float) -> Spread:
    """Return the time to read a batch of `rows` samples, interpolated between measured batches."""
    measured = query.model.read
    return interpolate(measured.items(), rows) if measured else NOTHING
