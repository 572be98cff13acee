"""Questions to forecasts of an experiment: where efficiency ends, what pays, what is lost."""

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

MOST_RANKS = 10_000
STEADY = 1e-3  # relative, of a bandwidth that is searched for
SLOWEST, FASTEST = 1e6 / 8, 1e12 / 8  # bytes/s between which it is searched


class Way(Protocol):
    """A strategy, as far as a study asks it."""

    def forecast(self, asked: Query) -> StepForecast:
        """What a step takes."""


class Place(NamedTuple):
    """A place of a map.

    Attributes:
        latency, bandwidth: of links, s and bytes/s.
        workers: ranks.
        seconds: by name, of a global batch, or to a target.
        bands: by name, of times to a target: by the seed of fewest steps and that of most; None:
            no seeds have a part in it.
    """

    latency: float
    workers: int
    bandwidth: float
    seconds: dict[str, float]
    bands: dict[str, tuple[float, float]] | None = None

    def to_target(self, steps: Mapping[str, Sequence[int]]) -> Place:
        """The same with the seconds to a target, of those that are known to come there.

        Args:
            steps: by name, what each seed needs; one seed says nothing of how others would do.
        """
        there = {name: s for name, s in self.seconds.items() if name in steps}
        return self._replace(
            seconds={name: s * median(steps[name]) for name, s in there.items()},
            bands={
                name: (s * min(steps[name]), s * max(steps[name]))
                if len(steps[name]) > 1
                else (0.0, inf)
                for name, s in there.items()
            },
        )


@dataclass(frozen=True)
class Study:
    """An experiment on a network of machines like the measured one, asked again and again.

    Args:
        experiment: what is trained; its batch is that of `workers` ranks.
        calibration: what was measured.
        network: between machines, a name or a `Network`.
        weak: each rank keeps its part of the batch, so that the global batch grows with the ranks;
            else these divide the batch that the experiment names.
        prices: and the target.
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
        strategy: Way | None = None,
        slow: float = 1.0,
    ) -> Forecast:
        """The forecast for so many workers, there, by another strategy, with one slow worker.

        Raises: InvalidInput, as `Experiment.forecast`.
        """
        own = self.experiment
        fields: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        if workers is not None:
            batch = own.batch_size
            if self.weak:
                batch = max(workers, round(batch * workers / own.workers))
            fields |= {"workers": workers, "batch_size": batch, "capacities": None}
        if slow != 1.0:
            fields["slow"] = {0: Slowdown(compute=slow)}
        world = network or Network.parse(self.network)
        return forecast(own.replace(**fields), self.calibration, world, False, self.prices)

    def efficiency(self, found: Forecast) -> float:
        """Weak or strong, as the study is."""
        return found.weak if self.weak else found.strong

    def workers_until(
        self, efficiency: float, strategy: Way | None = None, most: int = MOST_RANKS
    ) -> int | None:
        """The most workers up to which efficiency does not fall below this; None: it never does.

        Asked for are powers of two up to the first for which it does, then halves between that and
        the one before. Beyond it may rise again: some algorithms like powers of two.
        """
        return _last(lambda n: self.efficiency(self.at(n, strategy=strategy)) >= efficiency, most)

    def servers_needed(
        self, servers: Sequence[Way], workers: int | None = None, within: float = 0.05
    ) -> Way:
        """Of the same with ever more servers, the first that is so close to the fastest."""
        if not servers:
            raise InvalidInput("no servers to choose from; give strategies with ever more of them")
        times = [self.at(workers, strategy=server).seconds for server in servers]
        return next(
            server
            for server, seconds in zip(servers, times, strict=True)
            if seconds <= (1 + within) * min(times)
        )

    def bandwidth_until(self, strategy: Way, than: Way | None = None) -> float | None:
        """The bytes/s of a link from which on a strategy is no faster than another.

        Args:
            strategy: which says less, such as with a compressor.
            than: None: that of the experiment.

        Returns: 0.0: it is never faster; None: it is at any bandwidth up to 1 Tb/s.
        """
        world = Network.parse(self.network)
        assert world is not None  # for the type checker: a study has one

        def pays(bandwidth: float) -> bool:
            link = world.model_copy(update={"bandwidth": bandwidth})
            one = self.at(network=link, strategy=strategy).seconds
            return one < self.at(network=link, strategy=than).seconds

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
        ways: Mapping[str, Way],
        workers: Sequence[int],
        bandwidths: Sequence[float],
        latencies: Sequence[float],
    ) -> Iterator[Place]:
        """What each way takes for a global batch, on links of all bandwidths and latencies.

        Args:
            ways: strategies by name.
            workers: ranks.
            bandwidths: bytes/s.
            latencies: s.
        """
        world = Network.parse(self.network)
        assert world is not None  # for the type checker: a study has one
        for latency, count, bandwidth in product(latencies, workers, bandwidths):
            link = world.model_copy(update={"latency": latency, "bandwidth": bandwidth})
            seconds = {name: self.at(count, link, way).seconds for name, way in ways.items()}
            yield Place(latency, count, bandwidth, seconds)

    def slow_rank(
        self, factor: float, workers: int | None = None, strategy: Way | None = None
    ) -> float:
        """By which share a step is longer where one rank computes so many times as long."""
        usual = self.at(workers, strategy=strategy).seconds
        return self.at(workers, strategy=strategy, slow=factor).seconds / usual - 1


def _last(holds: Callable[[int], bool], most: int) -> int | None:
    """The last number from 1 on for which it holds; None: for all of them."""
    low = high = 1  # for one rank alone efficiency is what it is held against
    while low == high:
        if high == most:
            return None
        high = min(2 * high, most)
        low = high if holds(high) else low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
