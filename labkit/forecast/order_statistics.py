"""The compute time until the last of n ranks is done: order statistics of measured times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.forecast.calibration import Spread, add_spreads, scale_spread
from labkit.forecast.query import COMPUTED, Query
from labkit.network import ComputeTime, Slowdown

Draws: TypeAlias = NDArray[np.float64]
RUN = 100  # assumed number of steps in a run, for the deviation of the mean step time
DRAWS = 401  # number of draws from a distribution; an odd number has a middle draw, the median
# Distance from the median to the 95th percentile, in standard deviations.
TAIL = NormalDist().inv_cdf(0.95)
# Standard deviations at which the quantiles of a distribution are tabulated.
_GRID = np.linspace(-6.0, 6.0, 601)
_BELOW = np.array([NormalDist().cdf(z) for z in _GRID])


@dataclass(frozen=True)
class RankGroup:
    """Independent ranks with the same distribution of compute times.

    Attributes:
        seconds: Spread of one rank's compute time.
        count: Number of independent ranks in the group.
        laws: Distributions of random factors by which the time of each step is multiplied.
    """

    seconds: Spread
    count: int = 1
    laws: tuple[Slowdown | ComputeTime, ...] = ()


def group_ranks(query: Query, rows: Sequence[int]) -> list[RankGroup]:
    """Group ranks by batch size and slowdown.

    Without random factors, the ranks of one machine count as a single rank, because the calibration
    measured the slowest of them.
    """
    compute_time, groups = query.compute_time, []
    count_of = Counter((row, query.slowdowns.get(rank)) for rank, row in enumerate(rows))
    for (row_count, slower), count in count_of.items():
        step = query.compute_step(row_count)
        seconds = reduce(add_spreads, (getattr(step, name) for name in COMPUTED))
        distributions = () if compute_time is None else (compute_time,)
        if slower is not None and slower.distribution == "constant":
            seconds = scale_spread(seconds, slower.compute)
        elif slower is not None:
            distributions = (*distributions, slower)
        groups.append(
            RankGroup(
                seconds, count if distributions else -(-count // step.together), distributions
            )
        )
    return groups


def expected_maximum(groups: Sequence[RankGroup], draws: Draws) -> float:
    """Return the mean of randomly drawn times if a group has random factors; else, the median."""
    return float(np.mean(draws) if any(group.laws for group in groups) else np.median(draws))


def run_deviation(draws: Draws) -> float:
    """Return how far the 95th percentile of a run's mean step time is above the mean, s."""
    return float(TAIL * np.std(draws) / np.sqrt(RUN))


def slowest(groups: Sequence[RankGroup]) -> Draws:
    r"""Return the compute seconds of the slowest rank in `DRAWS` simulated steps.

    The slowest of m independent ranks takes \(F^{-1}(u^{1/m})\), where F is their distribution and
    u is uniform, so one draw represents all ranks of a group. If a group has random factors, the
    time of each of its ranks is drawn separately. The draws are stratified and use a fixed seed, so
    the same query gives the same result.
    """
    rng = np.random.default_rng(0)
    draws: Draws = np.max([_last(group, rng) for group in groups], axis=0)
    return draws


def quantiles(spread: Spread, number: Draws) -> Draws:
    """Return quantiles of a spread: a lognormal whose σ differs below and above the median."""
    middle = max(spread.median, 1e-300)
    up = np.log(max(spread.high, middle) / middle) / TAIL
    down = np.log(middle / max(min(spread.low, middle), 1e-300)) / TAIL
    z = np.interp(number, _BELOW, _GRID)
    seconds: Draws = spread.median * np.exp(np.where(z > 0, up, min(down, 5.0)) * z)
    return seconds


def stratified_numbers(rng: np.random.Generator) -> Draws:
    """Return the midpoints of `DRAWS` equal intervals of (0, 1), in random order."""
    return (rng.permutation(DRAWS) + 0.5) / DRAWS


def _last(group: RankGroup, rng: np.random.Generator) -> Draws:
    if not group.laws:
        return quantiles(group.seconds, stratified_numbers(rng) ** (1 / group.count))
    latest = np.zeros(DRAWS)
    for _ in range(group.count):
        seconds = quantiles(group.seconds, stratified_numbers(rng))
        for distribution in group.laws:
            seconds = seconds * np.interp(stratified_numbers(rng), _BELOW, _table(distribution))
        latest = np.maximum(latest, seconds)
    return latest


@lru_cache(maxsize=64)
def _table(distribution: Slowdown | ComputeTime) -> Draws:
    """Return the quantiles of a distribution at the probabilities `_BELOW`."""
    quantile_function: Callable[[float], float] = (
        distribution.factor if isinstance(distribution, Slowdown) else _factor(distribution)
    )
    return np.array([quantile_function(min(number, 1 - 1e-9)) for number in _BELOW.tolist()])


def _factor(compute_time: ComputeTime) -> Callable[[float], float]:
    """Return the quantile function of a compute time, relative to its mean."""
    if compute_time.trace is None:
        relative = compute_time.model_copy(update={"seconds": None})
        return lambda number: relative.quantile(number, 1.0)
    values = np.sort(np.ravel(compute_time.trace))
    return lambda number: float(values[int(number * len(values))] / values.mean())
