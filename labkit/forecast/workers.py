"""The times of workers: random compute times, and the wait for the slowest worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from statistics import NormalDist
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from labkit.compression import Compressor
from labkit.forecast.calibration import Spread, add_spreads, scale_spread
from labkit.forecast.meta_vector import MetaVector
from labkit.forecast.query import COMPUTED, Query
from labkit.network import ComputeTime, Network, Slowdown, relative_compute_times
from labkit.programs import Message, Program, Roles, ServerPieces
from labkit.programs.actions import TimingModel

Draws: TypeAlias = NDArray[np.float64]
RUN = 100  # The deviation of the mean step time is calculated for a run with this number of steps.
DRAWS = 401  # number of draws from a distribution; an odd number has a middle draw, the median
# `TAIL` is the distance from a normal distribution's median to its 95th percentile, in standard
# deviations.
TAIL = NormalDist().inv_cdf(0.95)
# `_GRID` contains the numbers of standard deviations at which the normal distribution is tabulated.
_GRID = np.linspace(-6.0, 6.0, 601)
_BELOW = np.array([NormalDist().cdf(z) for z in _GRID])


@dataclass(frozen=True)
class RankGroup:
    """Independent ranks with the same distribution of compute times.

    Attributes:
        seconds: Spread of one rank's compute time.
        count: Number of independent ranks in the group.
        laws: Distributions of random factors; each factor multiplies the time of one step.
    """

    seconds: Spread
    count: int = 1
    laws: tuple[Slowdown | ComputeTime, ...] = ()


def group_ranks(query: Query, rows: Sequence[int]) -> list[RankGroup]:
    """Group ranks by batch size and slowdown.

    The calibration measured the slowest rank of a machine. Without random factors, the ranks of one
    machine therefore count as a single rank.
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
    """Return the expected time of the slowest rank from simulated steps."""
    return float(np.mean(draws) if any(group.laws for group in groups) else np.median(draws))


def run_deviation(draws: Draws) -> float:
    """Return the distance in s from the mean to the 95th percentile of a run's mean step time."""
    return float(TAIL * np.std(draws) / np.sqrt(RUN))


def slowest(groups: Sequence[RankGroup]) -> Draws:
    r"""Return the compute seconds of the slowest rank in `DRAWS` simulated steps.

    The compute times of ranks have the distribution F. The slowest of m independent ranks takes
    \(F^{-1}(u^{1/m})\) for a uniform random u. One draw of u represents all ranks of a group. If a
    group has random factors, the time of each of its ranks is drawn separately. The draws are
    stratified and use a fixed seed, so the same query gives the same result.
    """
    rng = np.random.default_rng(0)
    draws: Draws = np.max([_last(group, rng) for group in groups], axis=0)
    return draws


def quantiles(spread: Spread, number: Draws) -> Draws:
    """Return quantiles of a lognormal distribution with one σ below and one above the median."""
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


PLAYED = 16  # maximum number of simulated workers with point-to-point communication
MEET = 512  # maximum number of simulated workers with collective communication


class ProgramWorkers(Protocol):
    """A strategy that consists of programs; see `labkit.strategies.ProgramStrategy`."""

    @property
    def replica_cut(self) -> int | tuple[int, int]:
        """The number of stages, or the grid, that divides a worker's model; 1 if undivided."""

    def copies(self, workers: int) -> Sequence[int]:
        """Return the numbers of the programs that store their own copy of the weights."""

    def parts(self, shapes: Sequence[tuple[int, ...]]) -> Sequence[ServerPieces]:
        """Return the slices of the weights that each server stores."""

    def hosts(self, workers: int) -> Sequence[int]:
        """Return the rank of each program: workers first, then servers, then other programs."""

    def program(self, roles: Roles, number: int, mark: Any = None) -> Program:
        """Create the program with the number `number`."""

    def recurs(self, experiment: Any) -> bool:
        """Return whether communication repeats in equal cycles if all steps take equal time."""


class Crowd(NamedTuple):
    """A sample of workers that represents a larger number of workers.

    Attributes:
        strategy: Strategy with which the sample trains.
        workers: Number of simulated workers.
        servers: Ratio of the real to the simulated traffic of each server.
        everyone: Ratio of the real to the simulated traffic, or number of predictions, of each
            worker.
    """

    strategy: ProgramWorkers
    workers: int
    servers: float = 1.0
    everyone: float = 1.0


def shapes_of(query: Query) -> list[tuple[int, ...]]:
    """Return the shapes of all trainable weights, in the order of the model."""
    return [shape for layer in query.model.layers for shape in layer.weights]


def slowdowns_of(query: Query, workers: int) -> dict[int, Slowdown]:
    """Return the slowdown of each slow worker; in a sample, the first workers are the slow ones."""
    slow = query.slowdowns
    if workers == query.workers:
        return slow
    return dict(enumerate(slowdown for _, slowdown in sorted(slow.items())[:workers]))


def meta_roles(query: Query, strategy: ProgramWorkers, workers: int) -> Roles:
    """Return the programs' roles, with weights that have a size but no values."""
    experiment, shapes = query.experiment, shapes_of(query)
    weights: Any = MetaVector(sum(map(math.prod, shapes)), query.dtype)
    sizes = [sum(map(math.prod, layer.weights)) for layer in query.model.layers if layer.weights]
    return Roles(
        workers,
        list(strategy.parts(shapes)),
        experiment.epoch_steps or 10**6,
        10**6,
        weights,
        list(strategy.hosts(workers)),
        experiment.seed,
        slower=relative_compute_times(slowdowns_of(query, workers), workers),
        layers=sizes,
        rate=experiment.learning_rate or 0.01,
    )


def sample_network(
    query: Query, roles: Roles, crowd: Crowd
) -> tuple[Network | None, dict[int, float]]:
    """Return a network that delays the simulated ranks as if they carried the traffic of all ranks.

    Returns: The network with slower transfers, and a factor for each simulated rank. The factor
        multiplies the transfer times of the rank.
    """
    network = query.network
    if network is None:
        return None, {}
    places = range(1 + max(roles.hosts))
    factors = dict.fromkeys(places, crowd.everyone) if crowd.everyone > 1 else {}
    if crowd.servers != 1:
        factors |= {roles.hosts[n]: crowd.servers for n in range(roles.workers, len(roles.hosts))}
    slow = {
        rank: slowdown
        for rank, slowdown in slowdowns_of(query, crowd.workers).items()
        if rank in places
    }
    for place, factor in factors.items():
        slowdown = slow.get(place, Slowdown())
        slow[place] = slowdown.model_copy(update={"transfer": slowdown.transfer * factor})
    return network.model_copy(update={"stragglers": slow}), factors


# The σ of random compute times is limited, because a few repeats on a busy machine overestimate σ.
WIDEST = 0.3
# For ranks that share a machine, the maximum σ is smaller, because only the slowest rank was
# measured.
UNLIKE = 0.02


@dataclass
class Pace:
    """The timing of a forecast: a timing model per worker, and overheads of messages.

    Attributes:
        query: The source of the measured costs of compression and messages.
        laws: Timing models, one per worker.
        shares: For each server, by program number, the fraction of all weights that the server
            updates.
        hosts: Simulated rank of each program; messages between programs on one rank take no time.
        alone: Factor that scales the simulated time of a server's update with one gradient.
        mean: Factor that multiplies the time of a server's update with the mean of several
            gradients.
        predictions: Factor that scales the simulated time of a prediction.
        overheads: Whether messages have the measured overhead of this machine.
        factor: Factor by which the next duration is multiplied; the runtime sets the factor for
            each action.
    """

    query: Query
    laws: Sequence[TimingModel]
    shares: Mapping[int, float]
    hosts: Sequence[int]
    alone: float = 1.0
    mean: float = 1.0
    predictions: float = 1.0
    overheads: bool = False
    factor: float = 1.0  # factor by which the next duration is multiplied
    _known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def computed(self, worker: int, step: int, start: float, share: float = 1.0) -> float:
        """Return the time when a computation ends, as `VirtualTiming.computed` does."""
        return self.laws[worker].computed(worker, step, start, self.factor * share)

    def updated(self, holder: int, start: float) -> float:
        """Return the time when an update of weights ends, as `VirtualTiming.updated` does."""
        return start + self.factor * self.shares.get(holder, 1.0) * self.laws[0].update

    def late(self, to: int, message: Message) -> float:
        """Return the additional delay of a message in seconds, as `VirtualTiming.late` does."""
        delay = self.laws[0].late(to, message)
        if not self.overheads or self.hosts[message.source] == self.hosts[to]:
            return delay
        return delay + self.overhead_seconds(
            "message", 0 if message.values is None else message.values.nbytes
        )

    def overhead_seconds(self, kind: str, nbytes: float) -> float:
        """Return the median seconds of an overhead, such as that of a message (cached)."""
        key = kind, nbytes
        if key not in self._known:
            self._known[key] = self.query.overhead_cost(kind, nbytes).median
        return float(self._known[key])

    def codec(self, compressor: Compressor, nbytes: float) -> tuple[float, float, int]:
        """Return the seconds to encode and to decode a gradient, and the bytes of its payload."""
        key = id(compressor), nbytes
        if key not in self._known:
            cost = self.query.codec(compressor, nbytes)
            seconds = (0.0, 0.0) if self.query.virtual else (cost.encode.median, cost.decode.median)
            self._known[key] = *seconds, cost.payload
        encode, decode, payload = self._known[key]
        return encode, decode, payload


def measured_distribution(query: Query, compute_time: ComputeTime, spread: Spread) -> ComputeTime:
    """Return a lognormal distribution with the measured median and middle 90% of compute times.

    The calibration measured only the slowest rank of a machine. For several ranks on one machine, σ
    is at most `UNLIKE`.
    """
    if compute_time.distribution != "constant" or query.virtual:
        return compute_time
    measured_sigma = math.log(spread.high / spread.low) / (2 * TAIL) if spread.low > 0 else WIDEST
    sigma = min(measured_sigma, WIDEST if query.ranks_per_machine == 1 else UNLIKE)
    mean = spread.median * math.exp(sigma**2 / 2)
    return ComputeTime(
        seconds=mean, distribution="lognormal", sigma=sigma, update=compute_time.update
    )
