"""How long n ranks compute until the last one is done: order statistics of what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.forecast.calibration import Spread
from labkit.forecast.query import COMPUTED, Query
from labkit.forecast.time_distributions import both, times
from labkit.network import ComputeTime, Slowdown

Draws: TypeAlias = NDArray[np.float64]
RUN = 100  # steps of a run whose mean is asked for
DRAWS = 401  # odd: the middle one is the median
TAIL = NormalDist().inv_cdf(0.95)  # standard deviations from the median to the 95th percentile
_GRID = np.linspace(-6.0, 6.0, 601)  # standard deviations at which a law is tabled
_BELOW = np.array([NormalDist().cdf(z) for z in _GRID])


@dataclass(frozen=True)
class Alike:
    """Ranks that compute alike, each for itself.

    Attributes:
        seconds: of one of them.
        count: how many there are.
        laws: what multiplies its seconds in each step anew.
    """

    seconds: Spread
    count: int = 1
    laws: tuple[Slowdown | ComputeTime, ...] = ()


def alike(asked: Query, rows: Sequence[int]) -> list[Alike]:
    """Ranks with so many rows each; of ranks of one machine the slowest was measured already."""
    law, found = asked.experiment.compute, []
    count_of = Counter((row, asked.slow.get(rank)) for rank, row in enumerate(rows))
    for (each, slower), count in count_of.items():
        step = asked.computed(each)
        seconds = reduce(both, (getattr(step, name) for name in COMPUTED))
        laws = () if law is None else (law,)
        if slower is not None and slower.law == "constant":
            seconds = times(seconds, slower.compute)
        elif slower is not None:
            laws = (*laws, slower)
        found.append(Alike(seconds, count if laws else -(-count // step.together), laws))
    return found


def last_of(groups: Sequence[Alike], draws: Draws) -> float:
    """Of a law the mean, which a whole training takes; of what varies by chance the typical one."""
    return float(np.mean(draws) if any(group.laws for group in groups) else np.median(draws))


def of_run(draws: Draws) -> float:
    """By how much the mean of a run's steps differs from run to run, s, nine times in ten."""
    return float(TAIL * np.std(draws) / np.sqrt(RUN))


def slowest(groups: Sequence[Alike]) -> Draws:
    r"""Seconds until the last of all ranks is done, in so many steps, shape (`DRAWS`,).

    Of m ranks that differ by chance alone the last one is \(F^{-1}(u^{1/m})\) with u uniform: one
    draw for all of them. Where laws multiply what was measured, each rank draws. Draws are
    stratified, and of a fixed seed: the same question has the same answer.
    """
    rng = np.random.default_rng(0)
    found: Draws = np.max([_last(group, rng) for group in groups], axis=0)
    return found


def drawn(spread: Spread, number: Draws) -> Draws:
    """The seconds below which it is with these probabilities: a lognormal in either direction."""
    middle = max(spread.median, 1e-300)
    up = np.log(max(spread.high, middle) / middle) / TAIL
    down = np.log(middle / max(min(spread.low, middle), 1e-300)) / TAIL
    z = np.interp(number, _BELOW, _GRID)
    seconds: Draws = spread.median * np.exp(np.where(z > 0, up, min(down, 5.0)) * z)
    return seconds


def strata(rng: np.random.Generator) -> Draws:
    """Numbers in (0, 1), one in each of so many equal parts, in any order."""
    return (rng.permutation(DRAWS) + 0.5) / DRAWS


def _last(group: Alike, rng: np.random.Generator) -> Draws:
    if not group.laws:
        return drawn(group.seconds, strata(rng) ** (1 / group.count))
    last = np.zeros(DRAWS)
    for _ in range(group.count):
        own = drawn(group.seconds, strata(rng))
        for law in group.laws:
            own = own * np.interp(strata(rng), _BELOW, _table(law))
        last = np.maximum(last, own)
    return last


@lru_cache(maxsize=64)
def _table(law: Slowdown | ComputeTime) -> Draws:
    """The law at each of `_BELOW`."""
    of: Callable[[float], float] = law.factor if isinstance(law, Slowdown) else _factor(law)
    return np.array([of(min(number, 1 - 1e-9)) for number in _BELOW.tolist()])


def _factor(law: ComputeTime) -> Callable[[float], float]:
    """Of its mean."""
    if law.values is None:
        alone = law.model_copy(update={"seconds": None})
        return lambda number: alone.quantile(number, 1.0)
    found = np.sort(np.ravel(law.values))
    return lambda number: float(found[int(number * len(found))] / found.mean())
