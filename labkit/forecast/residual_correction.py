"""Correction of forecasts by the difference between measured whole steps and their parts.

The parts of a step are measured separately, but they slow each other down in a whole step.
A forecast adds the times of the parts of a step. The correction is the measured time of the whole
step minus the forecast. Forecasts of other settings use the same correction.

The wait for data is the reading time that exceeds the previous step's time.

Data sets prefetch: a batch is read while ranks train on the previous batch. Calibrated steps use
batches that are already in memory, so their measured times include no reading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from labkit.common.units import plural
from labkit.forecast.calibration import (
    NOTHING,
    Provenance,
    Spread,
    WayCost,
    interpolate,
    model_of,
    range_note,
)
from labkit.forecast.query import COMPUTED, Query, StepForecast


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
        f"measured{note and note + ' rows'}; the previous step hides as much reading as possible"
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


# Beyond the outermost points, extrapolation reaches at most this fraction of the distance between
# the outermost points.
BEYOND = 0.5
NINE_IN_TEN = 0.9
MOST = 0.5  # a correction reduces a step at most by this fraction of the sum of its parts
Points = Sequence[tuple[float, float]]
_PART_FORECASTS: dict[
    tuple[str, str, str], StepForecast
] = {}  # cache of forecasts from a step's parts, because a forecast that runs programs takes long


@dataclass(frozen=True)
class Residual:
    """The difference between a measured whole step and the sum of its parts.

    Attributes:
        seconds: Difference, s, possibly negative.
        error: Error of the difference at the 90% level, s. The error does not include the variation
            between runs.
        how: Description of how the difference was obtained.
    """

    seconds: float
    error: float
    how: str


def add_residual(query: Query, parts_forecast: StepForecast) -> StepForecast:
    """Correct a forecast by the difference between measured whole steps and their parts.

    For some strategies, labkit has no measured step times. The computation time is then corrected
    by the difference of a single rank's step. Without measured steps of a single rank, the forecast
    is not corrected. A note then states that the forecast has no correction.
    """
    if query.virtual or query.compute_time is not None:
        return parts_forecast
    residual = _distributed_residual(query, parts_forecast) or _scaled_residual(
        query, parts_forecast
    )
    if residual is None:
        method = "the sum of the parts of a step, because whole steps were not measured"
        return replace(
            parts_forecast, sources=(*parts_forecast.sources, Provenance("whole step", method))
        )
    total, (low, high) = (
        _corrected_seconds(
            query, parts_forecast.rows, _seconds_without_stall(parts_forecast), residual
        ),
        parts_forecast.spread,
    )
    difference = total - parts_forecast.seconds
    # The errors of the parts, of the interpolation and between runs are independent, so their
    # squares are added.
    ratio = _run_ratio(query.calibration.ways)
    below = math.hypot((1 - low) * parts_forecast.seconds, residual.error, (1 - 1 / ratio) * total)
    above = math.hypot((high - 1) * parts_forecast.seconds, residual.error, (ratio - 1) * total)
    return replace(
        parts_forecast,
        parts={**parts_forecast.parts, "whole": difference},
        spread=(max(0.0, 1 - below / total), 1 + above / total),
        sources=(*parts_forecast.sources, Provenance("whole step", residual.how)),
        more={
            k: v + difference if k in ("step_low", "step_high") else v
            for k, v in parts_forecast.more.items()
        },
    )


def single_rank_seconds(query: Query, rows: float) -> float:
    """Return the corrected seconds of a single rank's step on a batch of `rows` samples."""
    residual = _single_rank_residual(query, rows)
    if query.virtual or query.compute_time is not None or residual is None:
        return seconds_with_input(query, rows)
    return _corrected_seconds(query, rows, query.single_rank_seconds(rows), residual)


def _corrected_seconds(query: Query, rows: float, seconds: float, residual: Residual) -> float:
    """Return a step's corrected seconds, which are at least the time to read the next batch.

    Args:
        query: Query with the experiment and the calibration.
        rows: Number of samples that a rank reads for the step.
        seconds: Sum of the step's parts without waits for data, s.
        residual: Correction of the step time, from measurements of whole steps.
    """
    return max(seconds + max(residual.seconds, -MOST * seconds), read(query, rows).median)


def _seconds_without_stall(taken: StepForecast) -> float:
    """Return the seconds of a step without waits for data."""
    return taken.seconds - taken.parts.get("read", 0.0)


def _single_rank_residual(query: Query, rows: float) -> Residual | None:
    """Return by how much a single rank's whole step exceeds its parts, for `rows` samples."""
    ways = [way for way in _matching_ways(query) if way.workers == 1]
    if not ways:
        return None
    points = [
        (float(way.batch), way.seconds.median - query.single_rank_seconds(way.batch))
        for way in ways
    ]
    seconds, error = interpolate_points(points, rows)
    return Residual(seconds, error, f"measured with one rank, by interpolation ({_runs(ways)})")


def _scaled_residual(query: Query, taken: StepForecast) -> Residual | None:
    """Return the correction of a single rank's step, scaled to the computation of step `taken`."""
    residual = _single_rank_residual(query, taken.rows)
    if residual is None or query.workers == 1:
        return residual
    share = sum(taken.parts.get(name, 0.0) for name in COMPUTED) / query.single_rank_seconds(
        taken.rows
    )
    method = (
        "difference of a single rank's step from its parts, scaled to the computation, "
        f"{residual.how}"
    )
    return Residual(share * residual.seconds, share * residual.error, method)


def _distributed_residual(query: Query, taken: StepForecast) -> Residual | None:
    """Return the correction for a step with several ranks, interpolated from measured steps."""
    if not query.emulated or query.workers == 1:
        return None
    strategy_json = query.experiment.strategy.to_json()
    ways = [way for way in _matching_ways(query) if way.workers == query.workers]
    matching, method = [way for way in ways if way.strategy == strategy_json], "measured"
    if not matching:
        matching = [
            way
            for way in ways
            if _without_compressor(way.strategy) == _without_compressor(strategy_json)
        ]
        method = "measured with another compressor"
    if not matching:
        return None
    batch = min(
        (way.batch for way in matching),
        key=lambda n: abs(math.log(n / query.experiment.batch_size)),
    )
    matching = [way for way in matching if way.batch == batch]
    forecasts = [_forecast_of_parts(query, way) for way in matching]
    points = [
        (forecast.parts.get("wire", 0.0), way.seconds.median - forecast.seconds)
        for way, forecast in zip(matching, forecasts, strict=True)
    ]
    seconds, error = interpolate_points(points, taken.parts.get("wire", 0.0))
    networks = " and ".join(sorted({way.network.name for way in matching if way.network}))
    return Residual(
        seconds, error, f"{method}, on {networks} with {batch} rows ({_runs(matching)})"
    )


def _matching_ways(query: Query) -> list[WayCost]:
    description, threads = model_of(query.experiment), query.experiment.threads
    ways = query.calibration.ways
    return [way for way in ways if way.model == description and way.threads == threads]


def _without_compressor(strategy: dict[str, object]) -> dict[str, object]:
    """Return the JSON of a strategy without its field `compressor`."""
    return {name: value for name, value in strategy.items() if name != "compressor"}


def _forecast_of_parts(query: Query, way: WayCost) -> StepForecast:
    """Return the forecast from the parts, for the setting of a measured whole step (cached)."""
    key = query.calibration.hash8, query.experiment.hash8, way.model_dump_json()
    if key not in _PART_FORECASTS:
        fields = {"strategy": way.strategy, "batch_size": way.batch, "network": way.network}
        experiment = query.experiment.replace(
            **fields, batch_weights=None, stragglers={}, faults=()
        )
        measured = replace(query, experiment=experiment, network=way.network)
        _PART_FORECASTS[key] = experiment.strategy.forecast(measured)
    return _PART_FORECASTS[key]


def interpolate_points(points: Points, at: float) -> tuple[float, float]:
    """Interpolate points (position, seconds); return the seconds at `at`, and their error.

    Extrapolation beyond the outermost points is limited by `BEYOND`. The error has two terms. The
    first is half of the difference from the nearest point's value. The second is half of the range
    of values at the nearest position. If all points have the same position, the error grows with
    the relative distance from this position.
    """
    positions, values = np.array(sorted(points), float).T
    unique_positions, indices = np.unique(positions, return_inverse=True)
    seconds = np.bincount(indices, values) / np.bincount(indices)
    nearest = int(np.argmin(np.abs(unique_positions - at)))
    half_spread = float(np.ptp(values[indices == nearest])) / 2
    if len(unique_positions) == 1:
        distance = abs(at - unique_positions[0]) / max(at, unique_positions[0], 1e-300)
        return float(seconds[0]), half_spread + float(distance * abs(seconds[0]))
    span = unique_positions[-1] - unique_positions[0]
    at = float(
        np.clip(at, unique_positions[0] - BEYOND * span, unique_positions[-1] + BEYOND * span)
    )
    second = int(np.clip(np.searchsorted(unique_positions, at), 1, len(unique_positions) - 1))
    first = second - 1
    slope = (seconds[second] - seconds[first]) / (
        unique_positions[second] - unique_positions[first]
    )
    value = float(seconds[first] + slope * (at - unique_positions[first]))
    return value, half_spread + abs(value - float(seconds[nearest])) / 2


def _run_ratio(ways: Sequence[WayCost]) -> float:
    """Return the 90th percentile of step time ratios (slower / faster) of pairs of equal runs."""
    pairs = [pair for way in ways for pair in combinations(way.runs, 2)]
    ratios = [max(pair) / min(pair) for pair in pairs]
    return float(np.quantile(ratios, NINE_IN_TEN)) if ratios else 1.0


def _runs(ways: Sequence[WayCost]) -> str:
    return plural(min(len(way.runs) for way in ways), "run")
