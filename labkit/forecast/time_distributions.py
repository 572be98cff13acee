"""Spreads of seconds: added up, made longer or wider, and read between those that were measured."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from labkit.forecast.calibration import Spread

NOTHING = Spread(median=0.0, low=0.0, high=0.0)


def times(spread: Spread, factor: float) -> Spread:
    """A spread of so many times as long."""
    median, low, high = (factor * each for each in (spread.median, spread.low, spread.high))
    return Spread(median=median, low=low, high=high, count=spread.count)


def both(one: Spread, other: Spread) -> Spread:
    """One after the other, each by its own chance: deviations add up as squares do."""
    median = one.median + other.median
    down = np.hypot(one.median - one.low, other.median - other.low)
    up = np.hypot(one.high - one.median, other.high - other.median)
    return Spread(median=median, low=max(0.0, median - float(down)), high=median + float(up))


def nine_tenths(seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Where the middle nine tenths of them begin and end."""
    # As `np.quantile`, whose first call in a process imports for longer than a forecast takes.
    places = np.linspace(0.0, 1.0, len(seconds))
    low, high = np.interp((0.05, 0.95), places, np.sort(seconds)).tolist()
    return low, high


def widen(spread: Spread, by: float) -> Spread:
    """As long, with so many seconds of another chance in both directions."""
    middle = spread.median
    low = max(0.0, middle - float(np.hypot(middle - spread.low, by)))
    high = middle + float(np.hypot(spread.high - middle, by))
    return Spread(median=middle, low=low, high=high, count=spread.count)


def line_through(low: Spread, high: Spread, share: float) -> Spread:
    """On the line through both, at this share of the way; never below nothing."""
    median = max(0.0, low.median + share * (high.median - low.median))
    near = low if share < 0.5 else high
    factors = [each / near.median if near.median else 1.0 for each in (near.low, near.high)]
    return Spread(
        median=median, low=median * factors[0], high=median * factors[1], count=near.count
    )


def by_bytes(known: Iterable[tuple[float, Spread]], nbytes: float) -> Spread:
    """On the line between two measured sizes, or beyond the last two; not below the least."""
    own = sorted(known, key=lambda each: each[0])
    if len(own) == 1 or nbytes <= own[0][0]:
        return own[0][1]
    place = int(np.clip(np.searchsorted([size for size, _ in own], nbytes), 1, len(own) - 1))
    (low, less), (high, more) = own[place - 1], own[place]
    return line_through(less, more, (nbytes - low) / (high - low))


def beyond(asked: float, measured: Iterable[float]) -> str:
    """In words, where so much is more than the most that was measured, or less than the least."""
    known = list(measured)
    if known and asked > max(known):
        return f", beyond the largest measured ({max(known):,g})"
    if known and asked < min(known):
        return f", beyond the smallest measured ({min(known):,g})"
    return ""
