"""The simulator of collectives, which computes times from a schedule and a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.common.units import seconds_text
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.schedules import ALLREDUCE, Collective, count_switches
from labkit.schedules.round import Schedule, count_chunks
from labkit.simulate.costs import Fit, Measurement, closed_form
from labkit.simulate.events import Events, Lockstep, Trace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Simulation:
    """The timing and the traffic of a schedule on a network.

    Args:
        finish: Time in s at which each rank finishes, shape (size,).
        messages, sent: Number and total bytes of the messages that each rank sends, shape (size,).
        links: Names of the links.
        carried: Total bytes on each link, shape (links,).
        occupied: Time in s that each link would be busy at full rate, shape (links,).
        trace: Record of all messages, if a trace was requested.
    """

    finish: Seconds
    messages: Seconds
    sent: Seconds
    links: list[str]
    carried: Seconds
    occupied: Seconds
    trace: Trace | None = None

    @property
    def seconds(self) -> float:
        """Time at which the last rank finishes, in s."""
        return float(self.finish.max())

    def utilisation(self, bins: int = 100) -> tuple[Seconds, Seconds]:
        """Return the utilisation of each link over time, in equal time intervals.

        Returns:
            Two arrays; the first has the edges of the intervals in s, shape (bins + 1,). The second
            array has the mean fraction of each link's bandwidth that is in use, shape (links,
            bins).

        Raises:
            InvalidInput: If the simulation has no trace.
        """
        trace = self.trace
        if trace is None:
            raise InvalidInput(
                "utilisation over time needs a trace of the messages; call simulate(trace=True)"
            )
        edges = np.linspace(0.0, self.seconds, bins + 1)
        occupied = np.zeros((len(self.links), bins + 1))
        for column, edge in enumerate(edges):
            before = np.clip(edge - trace.link_start, 0.0, trace.link_stop - trace.link_start)
            np.add.at(occupied[:, column], trace.link, before * trace.link_share)
        shares = np.diff(occupied, axis=1)
        width = np.broadcast_to(np.diff(edges), shares.shape)
        return edges, np.divide(shares, width, out=np.zeros_like(shares), where=width > 0)


def simulate(
    schedule: str | Schedule,
    size: int,
    nbytes: float,
    network: str | Network,
    *,
    gamma: float = 0.0,
    compute: ArrayLike = 0.0,
    trace: bool = False,
) -> Simulation:
    """Simulate a schedule: a rank starts a round once it has all messages of its previous round.

    A rank sends its messages when it starts the round. The rank ends the round once it has received
    and added its last message. The link of a rank carries the messages of its rounds one round
    after another. `Network.sharing` defines how simultaneous messages share a link. The simulation
    treats all chunks as equal in size.

    Args:
        schedule: Name of a schedule, or a function from the number of ranks to rounds.
            `Network.schedule` adapts a named schedule to the network.
        size: Number of ranks.
        nbytes: Size of each rank's buffer in bytes.
        network: Name of a network, or a `Network`.
        gamma: Time in s to add one byte.
        compute: Time in s before each rank starts, as one value or with shape (size,). Each time is
            multiplied by the compute factor of the rank.
        trace: Whether to record every message.

    Raises:
        InvalidInput: If a name or number is invalid.
    """
    network = Network.named(network) if isinstance(network, str) else network
    if size < 1 or nbytes < 0 or gamma < 0:
        raise InvalidInput(
            f"size={size}, nbytes={nbytes}, gamma={gamma} is impossible; give one rank or "
            f"more, and no negative numbers"
        )
    rounds = network.schedule(schedule) if isinstance(schedule, str) else schedule
    # The schedule is called twice, because a second call is cheaper than storing millions of
    # messages.
    chunk = nbytes / _count_chunks(rounds, size)
    options = network, size, gamma, compute, trace, count_switches(rounds, size)
    simulator: Lockstep | Events = Lockstep(*options)
    if not simulator.run(rounds(size), chunk):
        simulator = Events(*options)
        simulator.run(rounds(size), chunk)
    bandwidth, tally = simulator.links.bandwidth, simulator.tally
    recorded = Trace.of(simulator.log, simulator.segments, bandwidth) if trace else None
    counts = tally.messages[:size], tally.sent[:size], simulator.links.names, tally.carried
    return Simulation(simulator.clock[:size], *counts, tally.carried / bandwidth, recorded)


def _count_chunks(rounds: Schedule, size: int) -> int:
    """Count chunks as `count_chunks` does, but cache the result for a `Collective`."""
    function, arguments = rounds, dict[str, Any]()
    if isinstance(rounds, partial):
        function, arguments = rounds.func, rounds.keywords
    if isinstance(function, Collective) and all(isinstance(v, int) for v in arguments.values()):
        return _chunks_of(function, size, **arguments)
    return count_chunks(rounds(size))


@lru_cache(maxsize=128)
def _chunks_of(function: Collective[...], size: int, **arguments: int) -> int:
    return count_chunks(function(size, **arguments))


# `Rows` is the result of `labkit.bench.collectives.measure`; each row maps column names to values.
Rows: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Prediction:
    """One allreduce with three times in s: measured, simulated, and from the closed-form formula.

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
    """Simulate measured allreduces on a network or a fit, with `gamma` s per added byte.

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
    """Return the parts of the cost model: network, time to add a byte, and description.

    Args:
        rows: Rows of `labkit.bench.collectives.measure`.
        network: A network, its name, or a fit. If None, the network on which the rows were
            measured.
        gamma: Time in s to add one byte. A fit contains its own γ, so `gamma` is then ignored.

    Raises:
        InvalidInput: If there are no rows. `InvalidInput` is also raised if the network cannot be
            determined.
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
    """Return a text such as `fit of 9 measurements: α 12 µs, β 0.1 ns a byte, γ 0.05 ns a byte`."""
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


# A `Times` function returns each algorithm's seconds for one buffer size.
Times: TypeAlias = Callable[[float], Seconds]
TIE = 1e-9  # Two times count as equal if their relative difference is at most `TIE`.


@dataclass(frozen=True)
class SizeRange:
    """A range of buffer sizes from `first` to `last` bytes, with its fastest algorithms."""

    algorithms: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Simulated times in s, shape (algorithms, sizes), and the fastest algorithms by size range."""

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
    """Simulate all algorithms on all networks, at buffer sizes with a ratio of about √2."""
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
    """Return ranges of buffer sizes; a range has the algorithms that are fastest throughout."""
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
    """Find the size above which `high_index` is faster than `low_index`, by bisection."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        seconds = times(middle)
        if seconds[low_index] <= seconds[high_index]:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
