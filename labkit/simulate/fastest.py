"""What an allreduce costs by size of its buffer, and which algorithm is the fastest where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.simulate.simulation import simulate

Times: TypeAlias = Callable[[float], Seconds]  # bytes -> seconds of each algorithm
AS_LONG = 1e-9  # relative: times that differ by less are the same


@dataclass(frozen=True)
class Stretch:
    """Sizes from `first` to `last` bytes, on which these algorithms are the fastest."""

    algorithms: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Simulated times on one network: shape (algorithms, sizes), s; who is fastest where."""

    network: Network
    nbytes: Seconds
    seconds: Seconds
    fastest: list[Stretch]


def costs(
    algorithms: Sequence[str],
    size: int,
    networks: Sequence[str | Network],
    nbytes: tuple[float, float],
    gamma: float = 0.0,
) -> list[Costs]:
    """Simulate all algorithms on all networks; two sizes an octave of the buffer."""
    if size < 2 or not 0 < nbytes[0] < nbytes[1] or not algorithms or not networks:
        raise InvalidInput(
            f"size={size}, nbytes={tuple(nbytes)}, {len(algorithms)} algorithms, {len(networks)} "
            f"networks: give two ranks or more, 0 < least bytes < greatest, and one name at least"
        )
    return [_costs(algorithms, size, _named(network), nbytes, gamma) for network in networks]


def _named(network: str | Network) -> Network:
    return Network.named(network) if isinstance(network, str) else network


def _costs(
    algorithms: Sequence[str],
    size: int,
    network: Network,
    nbytes: tuple[float, float],
    gamma: float,
) -> Costs:
    def times(count: float) -> Seconds:
        each = (simulate(name, size, count, network, gamma=gamma) for name in algorithms)
        return np.array([one.seconds for one in each])

    points = 1 + max(1, round(2 * math.log2(nbytes[1] / nbytes[0])))
    grid = np.geomspace(*nbytes, points)
    seconds = np.stack([times(count) for count in grid.tolist()], axis=1)
    return Costs(network, grid, seconds, _stretches(algorithms, grid.tolist(), seconds, times))


def _stretches(
    algorithms: Sequence[str], grid: list[float], seconds: Seconds, times: Times
) -> list[Stretch]:
    """Follow who is fastest along the sizes; of those that are so together, as long as they are."""
    first, best = grid[0], _fastest(seconds[:, 0])
    found = []
    for place in range(1, len(grid)):
        there = _fastest(seconds[:, place])
        if both := [each for each in best if each in there]:
            best = both
            continue
        edge = _crossing(times, best[0], there[0], grid[place - 1], grid[place])
        found.append(Stretch(tuple(algorithms[each] for each in best), first, edge))
        first, best = edge, there
    return [*found, Stretch(tuple(algorithms[each] for each in best), first, grid[-1])]


def _fastest(seconds: Seconds) -> list[int]:
    """Places of all that are as fast as the fastest."""
    return [int(place) for place in np.flatnonzero(seconds <= seconds.min() * (1 + AS_LONG))]


def _crossing(times: Times, left: int, right: int, low: float, high: float) -> float:
    """The size between two at which the one that was faster is overtaken: halving, on a log."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        seconds = times(middle)
        if seconds[left] <= seconds[right]:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
