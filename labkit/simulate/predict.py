"""Tables of predicted and measured allreduce times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.schedules import ALLREDUCE
from labkit.simulate.costs import Fit, Measurement, closed_form
from labkit.simulate.simulation import simulate

if TYPE_CHECKING:
    import pandas


# Rows that `labkit.bench.collectives.measure` returns: numbers and names by column.
Rows: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prediction:
    """One allreduce with its measured, its simulated and its formula-based time, in s.

    `error` is predicted / measured - 1. For comparison: ASTRA-sim predicts a real allreduce with an
    error of 3 to 21 %.
    """

    algorithm: str
    size: int
    nbytes: float
    measured: float
    predicted: float
    closed_form: float
    error: float


def predict(
    measurements: Iterable[Measurement], network: str | Network, gamma: float = 0.0
) -> list[Prediction]:
    """Simulate measured allreduces on a network or a fit; gamma: time in s to add a byte.

    The formula of the closed-form time assumes a single switch. On a network with hosts or with a
    graph of links, only the simulation is valid.

    Raises:
        InvalidInput: If an algorithm or a network does not exist.
    """
    model = Network.named(network) if isinstance(network, str) else network
    return [_row(measurement, model, gamma) for measurement in measurements]


def measurements(rows: Rows) -> list[Measurement]:
    """Return the median times of those benchmark rows that have correct results and a schedule."""
    return [
        Measurement(row["bytes"], row["median_ms"] / 1e3, row["algorithm"], row["workers"])
        for row in rows
        if row["algorithm"] in ALLREDUCE and row.get("correct", True)
    ]


def prediction_table(rows: Rows, network: Network, gamma: float) -> pandas.DataFrame:
    """Return a table with a row per measurement: measured and predicted time (ms), and the error.

    The error is predicted / measured - 1. If labkit has no schedule of an algorithm, the rows of
    this algorithm have no prediction. Rows of runs with wrong results have no times.
    """
    import pandas as pd

    records = []
    for row in rows:
        correct = row.get("correct", True)
        predictions = predict(measurements([row]), network, gamma)
        prediction = predictions[0] if predictions else None
        records.append(
            {
                "algorithm": row["algorithm"],
                "workers": row["workers"],
                "bytes": row["bytes"],
                "measured_ms": row["median_ms"] if correct else None,
                "min_ms": row["min_ms"] if correct else None,
                "p90_ms": row["p90_ms"] if correct else None,
                "predicted_ms": 1e3 * prediction.predicted if prediction else None,
                "closed_form_ms": 1e3 * prediction.closed_form if prediction else None,
                "error": prediction.error if prediction else None,
                "correct": correct,
            }
        )
    times = ["measured_ms", "min_ms", "p90_ms", "predicted_ms", "closed_form_ms", "error"]
    return pd.DataFrame(records).astype(dict.fromkeys(times, "float64"))


def model_of(
    rows: Rows, network: str | Network | Fit | None, gamma: float
) -> tuple[Network, float, str]:
    """Return the network, γ, and a description of the cost model that predicts the given rows.

    Args:
        rows: Rows of `labkit.bench.collectives.measure`.
        network: A network, its name or a fit; None: the network on which the rows were measured.
        gamma: Time in s to add one byte; ignored for a fit, which contains γ.

    Raises:
        InvalidInput: If there are no rows. `InvalidInput` is also raised if `network` is None, and
            the rows name no network or several networks.
    """
    if not rows:
        raise InvalidInput("no rows to compare; give rows of labkit.bench.collectives.measure")
    if isinstance(network, Fit):
        return network.network(), network.gamma, _fit_text(network)
    if network is None:
        names = {row["network"] for row in rows}
        if len(names) > 1 or None in names:
            raise InvalidInput(
                f"the rows were measured on {', '.join(sorted(map(str, names)))}; give the network "
                f"for the prediction, or calibrate(measurements(rows))"
            )
        network = str(names.pop())
    model = Network.named(network) if isinstance(network, str) else network
    return model, gamma, f"simulation on {model}"


def _fit_text(fit: Fit) -> str:
    """Return `fit of 9 measurements: α 12 µs, β 0.1 ns a byte (9.8 GB/s), γ 0.05 ns a byte`."""
    speed = f" ({1e-9 / fit.beta:.3g} GB/s)" if fit.beta else ""
    return (
        f"fit of {fit.count} measurements: α {seconds_text(fit.alpha)}, "
        f"β {1e9 * fit.beta:.3g} ns a byte{speed}, γ {1e9 * fit.gamma:.3g} ns a byte"
    )


def _row(measurement: Measurement, network: Network, gamma: float) -> Prediction:
    seconds = simulate(
        measurement.algorithm, measurement.size, measurement.nbytes, network, gamma=gamma
    ).seconds
    form = closed_form(measurement.algorithm, measurement.size, measurement.nbytes, network, gamma)
    error = seconds / measurement.seconds - 1
    return Prediction(
        measurement.algorithm,
        measurement.size,
        measurement.nbytes,
        measurement.seconds,
        seconds,
        form,
        error,
    )


Times: TypeAlias = Callable[[float], Seconds]  # number of bytes -> seconds of each algorithm
TIE = 1e-9  # relative difference below which two times count as equal


@dataclass(frozen=True)
class SizeRange:
    """A range of buffer sizes from `first` to `last` bytes, with its fastest algorithms."""

    algorithms: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Simulated times in s, of shape (algorithms, sizes), and each size range's fastest ones."""

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
    """Simulate all algorithms on all networks, at buffer sizes that grow by about √2 each."""
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
    """Return ranges of buffer sizes, each with the algorithms that are fastest in all of it."""
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
    """Return the size from which `high_index` beats `low_index`, by bisection on a log scale."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        seconds = times(middle)
        if seconds[low_index] <= seconds[high_index]:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
