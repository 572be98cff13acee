"""Predicted step times of training methods on other links, from measured work and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from labkit.common.units import bits_text
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.step_costs import StepCosts, step_costs
from labkit.schedules import ALLREDUCE
from labkit.simulate import modelled

RANGE = (10e6 / 8, 100e9 / 8)  # range of bandwidths in bytes/s: 10 Mb/s to 100 Gb/s
LATENCY = 50e-6  # latency in seconds that is typical of 1 Gb/s Ethernet
_AS_COUNTED = 0.02  # maximum relative difference of measured and computed bytes


@dataclass(frozen=True)
class MethodCost:
    r"""A training method, whose step time on a link is modelled as \(w + a\alpha + n/B\).

    Attributes:
        name: Name of the method.
        runs: Measured runs of the method, which differ only in their networks and seeds.
        work: The seconds \(w\) per training step in which the slowest rank computes, compresses and
            decompresses.
        hops: The number \(a\) of successive messages per training step, each of which takes the
            latency \(\alpha\).
        nbytes: The bytes \(n\) per training step on the busiest link, whose bandwidth is \(B\).
    """

    name: str
    runs: tuple[Run, ...]
    work: float
    hops: float
    nbytes: float

    def seconds(self, bandwidth: float, latency: float = LATENCY) -> float:
        """Return the time of a training step in s, for a bandwidth in bytes/s and a latency in s.

        The model assumes that computation and communication do not overlap.
        """
        return self.work + latency * self.hops + self.nbytes / bandwidth


@dataclass(frozen=True)
class Win:
    """The bandwidths, from `first` to `last` bytes/s, at which one training method is fastest."""

    method: MethodCost
    first: float
    last: float


def methods(groups: Mapping[str, Sequence[Run]]) -> list[MethodCost]:
    """Return the cost model of each named group, with medians over the group's runs."""
    measured = []
    for name, runs in groups.items():
        links = [_link_costs(run, costs) for run in runs if (costs := step_costs(run))]
        if links:
            # A training method does the same work and sends the same bytes on every network.
            # Differences between the runs of one method are noise, which the median reduces.
            work, hops, nbytes = (median(column) for column in zip(*links, strict=True))
            measured.append(MethodCost(name, tuple(runs), work, hops, nbytes))
    return measured


def winners(methods: Sequence[MethodCost], latency: float, over: tuple[float, float]) -> list[Win]:
    r"""Return the fastest training method for each bandwidth, from the lowest to the highest.

    The step time of a training method is a straight line as a function of 1/B, where B is the
    bandwidth. The slope of the step time over 1/B is the number n of bytes, and the constant term
    is the fixed time \(f = w + a\alpha\). With increasing bandwidth, a method with bytes n' and a
    shorter fixed time f' becomes faster than a method with n and f. A method with n and f and a
    method with n' and f' are equally fast at \(B = (n' - n) / (f - f')\).
    """
    first, high = over

    def fixed(method: MethodCost) -> float:
        return method.work + latency * method.hops

    # If two methods are equally fast, the one with the shorter fixed time is faster at higher
    # bandwidths.
    best = min(methods, key=lambda method: (method.seconds(first, latency), fixed(method)))
    wins: list[Win] = []
    while True:
        edges = [
            ((other.nbytes - best.nbytes) / (fixed(best) - fixed(other)), fixed(other), index)
            for index, other in enumerate(methods)
            if fixed(other) < fixed(best)
        ]
        # If several lines cross at one point, the line with the shortest fixed time is the fastest
        # beyond this point.
        edge, _, index = min(edges, default=(high, 0.0, 0))
        if edge >= high:
            return [*wins, Win(best, first, high)]
        if edge > first:  # a method that is fastest only at the lowest bandwidth gets no range
            wins.append(Win(best, first, edge))
            first = edge
        best = methods[index]


def prediction_errors(methods: Iterable[MethodCost]) -> dict[Run, float]:
    """Return each run's relative prediction error (predicted / measured - 1) of the step time.

    The result contains only runs on an emulated network with a single switch.
    """
    return {
        run: method.seconds(network.bandwidth, network.latency) / seconds - 1
        for method in methods
        for run, network, (seconds, _, _) in emulated_runs(method)
    }


def emulated_runs(method: MethodCost) -> list[tuple[Run, Network, tuple[float, float, float]]]:
    """Return (run, network, (median, p10, p90) of step seconds) for runs on emulated switches."""
    return [
        (run, network, (step["median"] / 1e3, step["p10"] / 1e3, step["p90"] / 1e3))
        for run in method.runs
        if (network := _switch(run)) is not None
        for step in [run.metrics["step_ms"]]
    ]


def winners_text(wins: Sequence[Win]) -> str:
    """Return the fastest methods as text, such as `TopK up to 1.2 Gb/s, then no compression`."""
    *before, last = wins
    texts = [f"{win.method.name} up to {bits_text(win.last)}" for win in before]
    return ", then ".join([*texts, last.method.name if texts else f"{last.method.name} throughout"])


def _link_costs(run: Run, costs: StepCosts) -> tuple[float, float, float]:
    """Return work in s, successive messages, and bytes on the busiest link, per step of a run."""
    size = int(run.metrics["workers"])
    exchange = run.metrics.get("exchange") or run.experiment.get("strategy") or {}
    name = exchange.get("algorithm")
    if name in ALLREDUCE and costs.messages:
        formula = ALLREDUCE[name].counts(size)
        volume = float(formula.bytes(costs.payload).sum())
        if abs(volume - costs.sent) <= _AS_COUNTED * costs.sent:
            # If the sent bytes equal those in the formula of the allreduce algorithm, the run
            # reduces its whole payload. If the algorithm has several phases, the most expensive
            # phase is used.
            phase = max(modelled(name, size), key=lambda schedule: (schedule.beta, schedule.alpha))
            times = costs.messages / float(formula.messages.sum())
            return costs.work, phase.alpha * times, phase.beta * costs.payload
    # If the sent bytes differ from the formula, the payload changes its size along the route. For a
    # payload that changes its size, the messages of the busiest rank are counted one by one.
    return costs.work, costs.busiest_messages, costs.busiest


def _switch(run: Run) -> Network | None:
    """Return a run's emulated network if it consists of a single switch; otherwise None."""
    record = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    plain = network is not None and network.hosts is None and network.links is None
    return network if plain else None
