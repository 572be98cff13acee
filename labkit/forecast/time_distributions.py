"""Operations on spreads (median and 90% interval) of seconds: sums, scaling and interpolation."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from labkit.forecast.calibration import Spread

NOTHING = Spread(median=0.0, low=0.0, high=0.0)


def scale_spread(spread: Spread, factor: float) -> Spread:
    """Return a spread whose median and bounds are multiplied by a factor."""
    median, low, high = (factor * value for value in (spread.median, spread.low, spread.high))
    return Spread(median=median, low=low, high=high, count=spread.count)


def add_spreads(first: Spread, second: Spread) -> Spread:
    """Return the spread of the sum of two independent times, whose squared deviations add up."""
    median = first.median + second.median
    down = np.hypot(first.median - first.low, second.median - second.low)
    up = np.hypot(first.high - first.median, second.high - second.median)
    return Spread(median=median, low=max(0.0, median - float(down)), high=median + float(up))


def percentile_range(seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 5th and the 95th percentile of times."""
    # This line replaces `np.quantile`, whose first call imports modules, which takes longer than a
    # forecast.
    positions = np.linspace(0.0, 1.0, len(seconds))
    low, high = np.interp((0.05, 0.95), positions, np.sort(seconds)).tolist()
    return low, high


def widen(spread: Spread, by: float) -> Spread:
    """Widen a spread by an independent deviation of `by` seconds, below and above the median."""
    middle = spread.median
    low = max(0.0, middle - float(np.hypot(middle - spread.low, by)))
    high = middle + float(np.hypot(spread.high - middle, by))
    return Spread(median=middle, low=low, high=high, count=spread.count)


def line_through(low: Spread, high: Spread, share: float) -> Spread:
    """Return a spread on the line through two spreads, from share 0 (`low`) to 1 (`high`).

    The median is at least 0 s. The relative bounds of the result are those of the nearer spread,
    `low` or `high`.
    """
    median = max(0.0, low.median + share * (high.median - low.median))
    nearest = low if share < 0.5 else high
    factors = [
        bound / nearest.median if nearest.median else 1.0 for bound in (nearest.low, nearest.high)
    ]
    return Spread(
        median=median, low=median * factors[0], high=median * factors[1], count=nearest.count
    )


def interpolate(measured: Iterable[tuple[float, Spread]], nbytes: float) -> Spread:
    """Interpolate between measured sizes, and extrapolate above the largest of them.

    Sizes below the smallest measured size have the spread of the smallest.
    """
    points = sorted(measured, key=lambda point: point[0])
    if len(points) == 1 or nbytes <= points[0][0]:
        return points[0][1]
    index = int(np.clip(np.searchsorted([size for size, _ in points], nbytes), 1, len(points) - 1))
    (low, lower), (high, upper) = points[index - 1], points[index]
    return line_through(lower, upper, (nbytes - low) / (high - low))


def range_note(value: float, measured: Iterable[float]) -> str:
    """Return a note if a value is outside the measured range; otherwise, return an empty text."""
    values = list(measured)
    if values and value > max(values):
        return f", beyond the largest measured ({max(values):,g})"
    if values and value < min(values):
        return f", beyond the smallest measured ({min(values):,g})"
    return ""
