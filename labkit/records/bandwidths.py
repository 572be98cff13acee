"""What a step of each method would take on other links: measured work and bytes, modelled wires."""

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

RANGE = (10e6 / 8, 100e9 / 8)  # bytes/s: 10 Mb/s to 100 Gb/s
LATENCY = 50e-6  # s, as 1GbE
_AS_COUNTED = 0.02  # relative: so close to the formula's bytes, a step's are those of the formula


@dataclass(frozen=True)
class Method:
    r"""One way to train, and what a step of it takes on a link: \(w + a\alpha + n/B\).

    Attributes:
        name: what it is called.
        runs: that were measured; they differ in the network and seeds only.
        work: s, compute and codec of the slowest rank.
        hops: messages one after the other.
        nbytes: that pass the busiest link one after the other.
    """

    name: str
    runs: tuple[Run, ...]
    work: float
    hops: float
    nbytes: float

    def seconds(self, bandwidth: float, latency: float = LATENCY) -> float:
        """A step on links of so many bytes/s, each latency s; nothing overlaps."""
        return self.work + latency * self.hops + self.nbytes / bandwidth


@dataclass(frozen=True)
class Win:
    """Bandwidths from `first` to `last` bytes/s, on which a method is the fastest."""

    method: Method
    first: float
    last: float


def methods(groups: Mapping[str, Sequence[Run]]) -> list[Method]:
    """What runs have measured, by the name of their method; medians over several networks."""
    found = []
    for name, runs in groups.items():
        links = [_on_a_link(run, costs) for run in runs if (costs := step_costs(run))]
        if links:
            # On every network a method does the same work and sends the same bytes; what differs is
            # noise.
            work, hops, nbytes = (median(column) for column in zip(*links, strict=True))
            found.append(Method(name, tuple(runs), work, hops, nbytes))
    return found


def winners(found: Sequence[Method], latency: float, over: tuple[float, float]) -> list[Win]:
    r"""Who is fastest from the least bandwidth to the greatest.

    Over 1/B all times are straight lines: with more bandwidth only a method with less fixed time
    can take over, at \(B = (n' - n) / (f - f')\).
    """
    first, high = over

    def fixed(each: Method) -> float:
        return each.work + latency * each.hops

    # Of two that are equally fast, the one that stays fast with more bandwidth.
    best = min(found, key=lambda each: (each.seconds(first, latency), fixed(each)))
    wins: list[Win] = []
    while True:
        edges = [
            ((other.nbytes - best.nbytes) / (fixed(best) - fixed(other)), fixed(other), place)
            for place, other in enumerate(found)
            if fixed(other) < fixed(best)
        ]
        # Of lines that cross at one point, the lowest fixed time wins from there on.
        edge, _, place = min(edges, default=(high, 0.0, 0))
        if edge >= high:
            return [*wins, Win(best, first, high)]
        if edge > first:  # a tie at the least bandwidth is no change
            wins.append(Win(best, first, edge))
            first = edge
        best = found[place]


def prediction_errors(found: Iterable[Method]) -> dict[Run, float]:
    """Predicted / measured - 1 by run, each on its own emulated network."""
    return {
        run: each.seconds(network.bandwidth, network.latency) / seconds - 1
        for each in found
        for run, network, (seconds, _, _) in emulated(each)
    }


def emulated(each: Method) -> list[tuple[Run, Network, tuple[float, float, float]]]:
    """Its runs on emulated switches, and what a step took there: s, median, p10 and p90."""
    return [
        (run, network, (step["median"] / 1e3, step["p10"] / 1e3, step["p90"] / 1e3))
        for run in each.runs
        if (network := _switch(run)) is not None
        for step in [run.metrics["step_ms"]]
    ]


def in_turn(wins: Sequence[Win]) -> str:
    """`TopK up to 1.2 Gb/s, then no compression`"""
    *before, last = wins
    said = [f"{win.method.name} up to {bits_text(win.last)}" for win in before]
    return ", then ".join([*said, last.method.name if said else f"{last.method.name} throughout"])


def _on_a_link(run: Run, costs: StepCosts) -> tuple[float, float, float]:
    """Work in s, hops, and bytes on the busiest link."""
    size = int(run.metrics["workers"])
    exchange = run.metrics.get("exchange") or run.experiment.get("strategy") or {}
    name = exchange.get("algorithm")
    if name in ALLREDUCE and costs.messages:
        formula = ALLREDUCE[name].counts(size)
        volume = float(formula.bytes(costs.payload).sum())
        if abs(volume - costs.sent) <= _AS_COUNTED * costs.sent:
            # An allreduce of the whole payload; where it has several ways, that of most bytes.
            way = max(modelled(name, size), key=lambda each: (each.beta, each.alpha))
            times = costs.messages / float(formula.messages.sum())
            return costs.work, way.alpha * times, way.beta * costs.payload
    # Payloads that grow or differ on their way: the busiest rank sends one behind the other.
    return costs.work, costs.busiest_messages, costs.busiest


def _switch(run: Run) -> Network | None:
    """The emulated network, where it is one switch with equal links; else None."""
    record = run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    plain = network is not None and network.hosts is None and network.links is None
    return network if plain else None
