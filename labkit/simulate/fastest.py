"""The simulated time of allreduces by buffer size, and the fastest algorithm for each size."""

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

Times: TypeAlias = Callable[[float], Seconds]  # number of bytes -> seconds of each algorithm
TIE = 1e-9  # relative difference below which two times count as equal


@dataclass(frozen=True)
class SizeRange:
    """A range of buffer sizes, `first` to `last` bytes, and the algorithms fastest in it."""

    algorithms: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Simulated times in s on a network, (algorithms, sizes), and the fastest algorithms."""

    network: Network
    nbytes: Seconds
    seconds: Seconds
    fastest: list[SizeRange]


def costs(
    algorithms: Sequence[str],
    size: int,
    networks: Sequence[str | Network],
    nbytes: tuple[float, float],
    gamma: float = 0.0,
) -> list[Costs]:
    """Simulate all algorithms on all networks, at two buffer sizes for each factor of two."""
    if size < 2 or not 0 < nbytes[0] < nbytes[1] or not algorithms or not networks:
        raise InvalidInput(
            f"size={size}, nbytes={tuple(nbytes)}, {len(algorithms)} algorithms, {len(networks)} "
            f"networks; give two ranks or more, 0 < minimum < maximum bytes, and one name of each"
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
        simulations = (simulate(name, size, count, network, gamma=gamma) for name in algorithms)
        return np.array([simulation.seconds for simulation in simulations])

    points = 1 + max(1, round(2 * math.log2(nbytes[1] / nbytes[0])))
    grid = np.geomspace(*nbytes, points)
    seconds = np.stack([times(count) for count in grid.tolist()], axis=1)
    return Costs(network, grid, seconds, _size_ranges(algorithms, grid.tolist(), seconds, times))


def _size_ranges(
    algorithms: Sequence[str], grid: list[float], seconds: Seconds, times: Times
) -> list[SizeRange]:
    """Return ranges of buffer sizes, each with the algorithms that are fastest all over it."""
    first, best = grid[0], _fastest(seconds[:, 0])
    ranges = []
    for place in range(1, len(grid)):
        fastest = _fastest(seconds[:, place])
        if common := [index for index in best if index in fastest]:
            best = common
            continue
        edge = _crossing(times, best[0], fastest[0], grid[place - 1], grid[place])
        ranges.append(SizeRange(tuple(algorithms[index] for index in best), first, edge))
        first, best = edge, fastest
    return [*ranges, SizeRange(tuple(algorithms[index] for index in best), first, grid[-1])]


def _fastest(seconds: Seconds) -> list[int]:
    """Return the indices of the fastest algorithm and of all algorithms that tie with it."""
    return [int(place) for place in np.flatnonzero(seconds <= seconds.min() * (1 + TIE))]


def _crossing(times: Times, low_index: int, high_index: int, low: float, high: float) -> float:
    """Return the size above which `high_index` is faster than `low_index`, by bisection of logs."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        seconds = times(middle)
        if seconds[low_index] <= seconds[high_index]:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
