"""Predicted step times of methods on other links, from measured work and bytes and a link model."""

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

RANGE = (10e6 / 8, 100e9 / 8)  # bytes/s, from 10 Mb/s to 100 Gb/s
LATENCY = 50e-6  # seconds, as is typical of 1 Gb/s Ethernet
_AS_COUNTED = 0.02  # maximum relative difference of measured bytes from the formula's


@dataclass(frozen=True)
class MethodCost:
    r"""A training method and the model of its step time on a link: \(w + a\alpha + n/B\).

    Attributes:
        name: Name of the method.
        runs: Measured runs of the method, which differ only in network and seeds.
        work: Seconds \(w\) per step for which the slowest rank computes, compresses and
            decompresses.
        hops: Number \(a\) of consecutive messages per step, each of which takes the latency
            \(\alpha\).
        nbytes: Bytes \(n\) per step on the busiest link, whose bandwidth is \(B\).
    """

    name: str
    runs: tuple[Run, ...]
    work: float
    hops: float
    nbytes: float

    def seconds(self, bandwidth: float, latency: float = LATENCY) -> float:
        """Return the step time in seconds, for a bandwidth in bytes/s and a latency in seconds.

        The model assumes that communication does not overlap computation.
        """
        return self.work + latency * self.hops + self.nbytes / bandwidth


@dataclass(frozen=True)
class Win:
    """The range of bandwidths, `first` to `last` bytes/s, in which a method is the fastest."""

    method: MethodCost
    first: float
    last: float


def methods(groups: Mapping[str, Sequence[Run]]) -> list[MethodCost]:
    """Return the cost model of each named group of runs, as medians over the group's runs."""
    measured = []
    for name, runs in groups.items():
        links = [_link_costs(run, costs) for run in runs if (costs := step_costs(run))]
        if links:
            # A method does the same work and sends the same bytes on every network, so that other
            # differences between its runs are noise.
            work, hops, nbytes = (median(column) for column in zip(*links, strict=True))
            measured.append(MethodCost(name, tuple(runs), work, hops, nbytes))
    return measured


def winners(methods: Sequence[MethodCost], latency: float, over: tuple[float, float]) -> list[Win]:
    r"""Return the fastest methods, from the lowest to the highest bandwidth.

    Each method's step time is a straight line over 1/B, with n bytes as slope and the fixed time
    \(f = w + a\alpha\). A method with less fixed time therefore takes the lead as bandwidth grows,
    at \(B = (n' - n) / (f - f')\).
    """
    first, high = over

    def fixed(method: MethodCost) -> float:
        return method.work + latency * method.hops

    # Of two equally fast methods, the one with less fixed time is faster at higher bandwidths.
    best = min(methods, key=lambda method: (method.seconds(first, latency), fixed(method)))
    wins: list[Win] = []
    while True:
        edges = [
            ((other.nbytes - best.nbytes) / (fixed(best) - fixed(other)), fixed(other), index)
            for index, other in enumerate(methods)
            if fixed(other) < fixed(best)
        ]
        # Where several lines cross at one point, the line with the lowest fixed time wins.
        edge, _, index = min(edges, default=(high, 0.0, 0))
        if edge >= high:
            return [*wins, Win(best, first, high)]
        if edge > first:  # A tie at the lowest bandwidth changes no winner.
            wins.append(Win(best, first, edge))
            first = edge
        best = methods[index]


def prediction_errors(methods: Iterable[MethodCost]) -> dict[Run, float]:
    """Return the relative error (predicted / measured - 1) of each run's step time.

    Only runs on an emulated switch are included.
    """
    return {
        run: method.seconds(network.bandwidth, network.latency) / seconds - 1
        for method in methods
        for run, network, (seconds, _, _) in emulated_runs(method)
    }


def emulated_runs(method: MethodCost) -> list[tuple[Run, Network, tuple[float, float, float]]]:
    """Return a method's runs on emulated switches, with network and (median, p10, p90) seconds."""
    return [
        (run, network, (step["median"] / 1e3, step["p10"] / 1e3, step["p90"] / 1e3))
        for run in method.runs
        if (network := _switch(run)) is not None
        for step in [run.metrics["step_ms"]]
    ]


def winners_text(wins: Sequence[Win]) -> str:
    """Return the fastest methods as text: `TopK up to 1.2 Gb/s, then no compression`."""
    *before, last = wins
    texts = [f"{win.method.name} up to {bits_text(win.last)}" for win in before]
    return ", then ".join([*texts, last.method.name if texts else f"{last.method.name} throughout"])


def _link_costs(run: Run, costs: StepCosts) -> tuple[float, float, float]:
    """Return a run's work in seconds, number of hops, and bytes on the busiest link, per step."""
    size = int(run.metrics["workers"])
    exchange = run.metrics.get("exchange") or run.experiment.get("strategy") or {}
    name = exchange.get("algorithm")
    if name in ALLREDUCE and costs.messages:
        formula = ALLREDUCE[name].counts(size)
        volume = float(formula.bytes(costs.payload).sum())
        if abs(volume - costs.sent) <= _AS_COUNTED * costs.sent:
            # The run reduces the whole payload. Of the algorithm's phases, the largest counts.
            phase = max(modelled(name, size), key=lambda schedule: (schedule.beta, schedule.alpha))
            times = costs.messages / float(formula.messages.sum())
            return costs.work, phase.alpha * times, phase.beta * costs.payload
    # Otherwise payloads change along the route, so the busiest rank's messages count one by one.
    return costs.work, costs.busiest_messages, costs.busiest


def _switch(run: Run) -> Network | None:
    """Return the emulated network if it is one switch with equal links, else None."""
    record = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    plain = network is not None and network.hosts is None and network.links is None
    return network if plain else None
