"""Fit latency, bandwidth and adding speed to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.simulate.costs import modelled


@dataclass(frozen=True)
class Measurement:
    """One measured allreduce: `nbytes` among `size` ranks took `seconds` (the median)."""

    nbytes: float
    seconds: float
    algorithm: str = "ring"
    size: int = 2


@dataclass(frozen=True)
class Fit:
    """What fits the measurements best.

    Args: alpha: latency, s; beta, gamma: s to send and to add one byte; error: median of
    |predicted / measured - 1|; worst: its maximum; count: number of measurements.
    """

    alpha: float
    beta: float
    gamma: float
    error: float
    worst: float
    count: int

    def network(self, name: str = "calibrated") -> Network:
        """The network of this latency and bandwidth.

        Raises: InvalidInput, where time did not grow with bytes.
        """
        if self.beta == 0:
            raise InvalidInput(
                "the measured times do not grow with the bytes sent, so there is no bandwidth: "
                "measure larger buffers"
            )
        return Network(name=name, latency=self.alpha, bandwidth=1 / self.beta)


def calibrate(measurements: Sequence[Measurement]) -> Fit:
    """Least squares of a·α + b·nβ + c·nγ (`modelled`) with relative weights, none negative.

    Minimises Σ (predicted / measured - 1)². Where b : c is the same in all measurements (one
    algorithm, one size), or so alike that noise would make sending free, adding cannot be told
    from sending: then γ = 0, and β holds both.

    Raises: InvalidInput, for less than two measurements, times not above 0 or a single rank.
    """
    if len(measurements) < 2 or any(
        measurement.seconds <= 0 or measurement.size < 2 for measurement in measurements
    ):
        raise InvalidInput(
            f"{len(measurements)} measurements: a fit needs two at least, with times above 0, of "
            f"two ranks or more"
        )
    ways = [_ways(measurement) for measurement in measurements]  # each of shape (ways, 3)
    chosen = [0] * len(ways)
    found = _not_negative(_rows(ways, chosen))
    # Of several ways the slowest counts; which that is depends on what is found: a few turns.
    for _ in range(10):
        slowest = [int(np.argmax(way @ found)) for way in ways]
        if slowest == chosen:
            break
        chosen = slowest
        found = _not_negative(_rows(ways, chosen))
    error = np.abs([float((way @ found).max()) - 1 for way in ways])
    alpha, beta, gamma = (float(value) for value in found)
    return Fit(alpha, beta, gamma, float(np.median(error)), float(error.max()), len(error))


def _ways(each: Measurement) -> Seconds:
    """Rows (a, b·n, c·n) / measured seconds: times (α, β, γ) they should give 1."""
    costs = modelled(each.algorithm, each.size)
    rows = [(cost.alpha, cost.beta * each.nbytes, cost.gamma * each.nbytes) for cost in costs]
    return np.array(rows) / each.seconds


def _rows(ways: list[Seconds], chosen: list[int]) -> Seconds:
    return np.stack([way[index] for way, index in zip(ways, chosen, strict=True)])


def _not_negative(rows: Seconds) -> Seconds:
    """The x ≥ 0 that brings rows @ x closest to 1: of all subsets of columns, the best.

    A subset counts where its columns are independent; ties go to the smaller, earlier one. None
    has γ without β: what is added up has been sent.
    """
    best, residual = np.zeros(3), np.inf
    subsets = [
        list(combination) for count in (1, 2, 3) for combination in combinations(range(3), count)
    ]
    for subset in (each for each in subsets if 2 not in each or 1 in each):
        scale = np.linalg.norm(rows[:, subset], axis=0)
        columns = rows[:, subset] / np.where(scale > 0, scale, 1)
        answer, _, rank, _ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)
        left = float(np.sum((columns @ answer - 1) ** 2))
        if rank == len(subset) and (answer >= 0).all() and left < residual - 1e-12:
            best, residual = np.zeros(3), left
            best[subset] = answer / scale
    return best
