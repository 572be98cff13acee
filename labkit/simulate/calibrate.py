"""Fit of latency, bandwidth and time of addition to measured times of allreduces."""

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
    """A measured allreduce: median time in seconds for `nbytes` bytes on `size` ranks."""

    nbytes: float
    seconds: float
    algorithm: str = "ring"
    size: int = 2


@dataclass(frozen=True)
class Fit:
    """The parameters that fit the measurements best.

    Args:
        alpha: Latency α in s.
        beta, gamma: Time in s to send one byte (β), and to add one byte (γ).
        error: Median of |predicted / measured - 1|.
        worst: Maximum of |predicted / measured - 1|.
        count: Number of measurements.
    """

    alpha: float
    beta: float
    gamma: float
    error: float
    worst: float
    count: int

    def network(self, name: str = "calibrated") -> Network:
        """Return the network with this latency and bandwidth.

        Raises:
            InvalidInput: If the measured times do not grow with the number of bytes.
        """
        if self.beta == 0:
            raise InvalidInput(
                "the measured times do not grow with the bytes sent, so no bandwidth can be "
                "fitted; measure larger buffers"
            )
        return Network(name=name, latency=self.alpha, bandwidth=1 / self.beta)


def calibrate(measurements: Sequence[Measurement]) -> Fit:
    """Fit α, β, γ in a·α + b·nβ + c·nγ (`modelled`) by non-negative relative least squares.

    The fit minimizes Σ (predicted / measured - 1)². If all measurements have the same ratio b : c
    (one algorithm and one size), the fit cannot separate the times of sending and of addition. The
    same holds if the ratios differ so little that noise would make β zero. In both cases the fit
    sets γ to 0, and β contains both times.

    Raises:
        InvalidInput: If there are fewer than two measurements, if a time is not above 0, or if a
            measurement used a single rank.
    """
    if len(measurements) < 2 or any(
        measurement.seconds <= 0 or measurement.size < 2 for measurement in measurements
    ):
        raise InvalidInput(
            f"these {len(measurements)} measurements allow no fit; give at least two, with times "
            f"above 0, on two ranks or more"
        )
    paths = [_path_rows(measurement) for measurement in measurements]  # each of shape (paths, 3)
    critical = [0] * len(paths)
    parameters = _nonnegative_fit(_rows(paths, critical))
    # The predicted time of an allreduce is that of its slowest path. Which path is slowest depends
    # on the fit, so a few iterations determine both.
    for _ in range(10):
        slowest = [int(np.argmax(path @ parameters)) for path in paths]
        if slowest == critical:
            break
        critical = slowest
        parameters = _nonnegative_fit(_rows(paths, critical))
    error = np.abs([float((path @ parameters).max()) - 1 for path in paths])
    alpha, beta, gamma = (float(value) for value in parameters)
    return Fit(alpha, beta, gamma, float(np.median(error)), float(error.max()), len(error))


def _path_rows(measurement: Measurement) -> Seconds:
    """Return rows (a, b·n, c·n) / measured seconds; ideally, each row times (α, β, γ) is 1."""
    costs = modelled(measurement.algorithm, measurement.size)
    rows = [
        (cost.alpha, cost.beta * measurement.nbytes, cost.gamma * measurement.nbytes)
        for cost in costs
    ]
    return np.array(rows) / measurement.seconds


def _rows(paths: list[Seconds], critical: list[int]) -> Seconds:
    return np.stack([path[index] for path, index in zip(paths, critical, strict=True)])


def _nonnegative_fit(rows: Seconds) -> Seconds:
    """Return the x ≥ 0 for which rows @ x is closest to 1, from the fits of all column subsets.

    Only subsets of independent columns are tried; of equally good subsets, the smaller and earlier
    one is chosen. No subset has the column of γ without that of β, because every byte that is added
    was also sent.
    """
    best, residual = np.zeros(3), np.inf
    subsets = [
        list(combination) for count in (1, 2, 3) for combination in combinations(range(3), count)
    ]
    for subset in (
        measurement for measurement in subsets if 2 not in measurement or 1 in measurement
    ):
        scale = np.linalg.norm(rows[:, subset], axis=0)
        columns = rows[:, subset] / np.where(scale > 0, scale, 1)
        answer, _, rank, _ = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=1e-9)
        squares = float(np.sum((columns @ answer - 1) ** 2))
        if rank == len(subset) and (answer >= 0).all() and squares < residual - 1e-12:
            best, residual = np.zeros(3), squares
            best[subset] = answer / scale
    return best
