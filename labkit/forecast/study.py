"""Studies of forecasts: scaling limits, comparison of two strategies, effects of slow ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from statistics import median
from typing import Any, NamedTuple, Protocol

from labkit.common.errors import InvalidInput
from labkit.forecast.calibration import Calibration
from labkit.forecast.forecast import Forecast, Prices, forecast
from labkit.forecast.query import Query, StepForecast
from labkit.network import Network, Slowdown

MOST_RANKS = 10_000  # maximum number of workers in a search by `workers_until`
STEADY = 1e-3  # relative precision of the result of the bandwidth search
SLOWEST, FASTEST = 1e6 / 8, 1e12 / 8  # limits of the bandwidth search in bytes/s


class ForecastStrategy(Protocol):
    """A strategy that can forecast the time of its training step."""

    def forecast(self, query: Query) -> StepForecast:
        """Return the forecast of one training step for the query's experiment and network."""


class MapPoint(NamedTuple):
    """The forecasts of several strategies for one network and one number of workers.

    Attributes:
        latency, bandwidth: Latency and bandwidth of links, s and bytes/s.
        workers: Number of ranks that train.
        seconds: Seconds of each strategy, by name. The seconds are those of a global batch, or
            those until a target is reached.
        bands: For each strategy, the interval of training times over all seeds. Without a target,
            the attribute `bands` is None.
    """

    latency: float
    workers: int
    bandwidth: float
    seconds: dict[str, float]
    bands: dict[str, tuple[float, float]] | None = None

    def to_target(self, steps: Mapping[str, Sequence[int]]) -> MapPoint:
        """Return a point with the seconds to a target, computed from each strategy's steps to it.

        Args:
            steps: For each strategy, by name: the number of steps to the target, one number per
                seed. With a single seed, the interval over seeds is unknown, so it reaches from 0
                to infinity.
        """
        reaching = {name: s for name, s in self.seconds.items() if name in steps}
        return self._replace(
            seconds={name: s * median(steps[name]) for name, s in reaching.items()},
            bands={
                name: (s * min(steps[name]), s * max(steps[name]))
                if len(steps[name]) > 1
                else (0.0, inf)
                for name, s in reaching.items()
            },
        )


@dataclass(frozen=True)
class Study:
    """A study of an experiment on several machines that equal the calibrated machine.

    Args:
        experiment: Experiment to vary; its batch size is the global batch for its own number of
            workers.
        calibration: Measured costs.
        network: Network between the machines, as a name or a `Network`.
        weak: Whether to study weak scaling. In weak scaling, each rank has a constant part of the
            batch. The global batch of weak scaling grows with the number of ranks. In strong
            scaling, all ranks together divide the experiment's batch.
        prices: Prices, and the number of steps of the training.
    """

    experiment: Any
    calibration: Calibration
    network: str | Network
    weak: bool = True
    prices: Prices = field(default_factory=Prices)

    def at(
        self,
        workers: int | None = None,
        network: Network | None = None,
        strategy: ForecastStrategy | None = None,
        slow: float = 1.0,
    ) -> Forecast:
        """Return the forecast with another number of workers, network or strategy.

        The argument `slow` is the factor by which worker 0 computes slower.

        Raises:
            InvalidInput: `Experiment.forecast` rejects the experiment.
        """
        experiment = self.experiment
        fields: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        if workers is not None:
            batch = experiment.batch_size
            if self.weak:
                batch = max(workers, round(batch * workers / experiment.workers))
            fields |= {"workers": workers, "batch_size": batch, "batch_weights": None}
        if slow != 1.0:
            fields["stragglers"] = {0: Slowdown(compute=slow)}
        world = network or Network.parse(self.network)
        return forecast(experiment.replace(**fields), self.calibration, world, False, self.prices)

    def efficiency(self, result: Forecast) -> float:
        """Return a forecast's efficiency in weak or strong scaling, according to `weak`."""
        return result.weak_efficiency if self.weak else result.strong_efficiency

    def workers_until(
        self, efficiency: float, strategy: ForecastStrategy | None = None, most: int = MOST_RANKS
    ) -> int | None:
        """Return the largest worker count that reaches `efficiency`; None if `most` reaches it too.

        The search tests powers of two until the efficiency is too low, and then bisects the last
        interval. Beyond the returned number of workers, efficiency may rise again. Some algorithms
        work best with a power of two as the number of workers.
        """
        return _last(lambda n: self.efficiency(self.at(n, strategy=strategy)) >= efficiency, most)

    def servers_needed(
        self, servers: Sequence[ForecastStrategy], workers: int | None = None, within: float = 0.05
    ) -> ForecastStrategy:
        """Return the first strategy whose step time is almost the shortest (see `within`).

        Args:
            servers: Strategies in increasing order of their number of servers.
            workers: Number of workers; None: the number of the experiment.
            within: How much longer than the shortest step time a step may take, as a fraction.
        """
        if not servers:
            raise InvalidInput(
                "no server strategies to compare; give strategies with different numbers of servers"
            )
        times = [self.at(workers, strategy=server).seconds for server in servers]
        return next(
            server
            for server, seconds in zip(servers, times, strict=True)
            if seconds <= (1 + within) * min(times)
        )

    def bandwidth_until(
        self, strategy: ForecastStrategy, than: ForecastStrategy | None = None
    ) -> float | None:
        """Return the link bandwidth, bytes/s, below which one strategy is faster than another.

        Args:
            strategy: Strategy that sends fewer bytes, for example with a compressor.
            than: Strategy to compare `strategy` with; None: the strategy of the experiment.

        Returns:
            Bandwidth, bytes/s; 0.0 if `strategy` is never faster. The bandwidth is None if
            `strategy` is faster at all bandwidths up to 1 Tb/s.
        """
        world = Network.parse(self.network)
        assert world is not None  # The type checker cannot know that a study always has a network.

        def pays(bandwidth: float) -> bool:
            link = world.model_copy(update={"bandwidth": bandwidth})
            seconds = self.at(network=link, strategy=strategy).seconds
            return seconds < self.at(network=link, strategy=than).seconds

        if not pays(SLOWEST):
            return 0.0
        if pays(FASTEST):
            return None
        low, high = SLOWEST, FASTEST
        while high / low > 1 + STEADY:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if pays(middle) else (low, middle)
        return low

    def map(
        self,
        ways: Mapping[str, ForecastStrategy],
        workers: Sequence[int],
        bandwidths: Sequence[float],
        latencies: Sequence[float],
    ) -> Iterator[MapPoint]:
        """Yield the strategies' step times per combination of latency, workers and bandwidth.

        Args:
            ways: Strategies by name.
            workers: Numbers of workers to forecast.
            bandwidths: Link bandwidths to forecast, bytes/s.
            latencies: Link latencies to forecast, s.
        """
        world = Network.parse(self.network)
        assert world is not None  # The type checker cannot know that a study always has a network.
        for latency, count, bandwidth in product(latencies, workers, bandwidths):
            link = world.model_copy(update={"latency": latency, "bandwidth": bandwidth})
            seconds = {name: self.at(count, link, way).seconds for name, way in ways.items()}
            yield MapPoint(latency, count, bandwidth, seconds)

    def slow_rank(
        self, factor: float, workers: int | None = None, strategy: ForecastStrategy | None = None
    ) -> float:
        """Return the step time's relative increase if worker 0 computes slower by `factor`."""
        usual = self.at(workers, strategy=strategy).seconds
        return self.at(workers, strategy=strategy, slow=factor).seconds / usual - 1


def _last(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the largest number below `most` that meets a condition; None if `most` meets it too.

    The number 1 must satisfy the condition. The search tests powers of two until one does not
    satisfy the condition, and then bisects.
    """
    low = high = 1  # Efficiency is relative to one rank, so one rank satisfies every condition.
    while low == high:
        if high == most:
            return None
        high = min(2 * high, most)
        low = high if holds(high) else low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
