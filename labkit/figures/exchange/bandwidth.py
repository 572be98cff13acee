"""Who wins at which bandwidth: measured work and bytes of each method, predicted on other links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import LabkitError
from labkit.common.units import seconds_axis, seconds_text
from labkit.figures.kit.entries import (
    Entry,
    Line,
    clock_and_network,
    entries,
    lines,
)
from labkit.figures.kit.marks import crosses, curve, points
from labkit.figures.kit.methods import by_method
from labkit.figures.kit.panels import Panel, Trace, busy, sheet
from labkit.figures.runs.speed import refusals
from labkit.network import Network
from labkit.records.run import Run
from labkit.records.step_costs import StepCosts, step_costs
from labkit.schedules import ALLREDUCE
from labkit.simulate import modelled

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

RANGE = (10e6 / 8, 100e9 / 8)  # bytes/s: 10 Mb/s to 100 Gb/s
LATENCY = 50e-6  # s, as 1GbE
_ROOM = 0.7  # of the least time: below it the figure writes where the winner changes
_AS_COUNTED = 0.02  # relative: so close to the formula's bytes, a step's are those of the formula
_SCALES = ((1e9, "Gb/s"), (1e6, "Mb/s"), (1e3, "kb/s"))


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
    runs: tuple[Entry, ...]
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


def bandwidth(
    runs: Iterable[Run] | Run, latency: float = LATENCY, over: tuple[float, float] = RANGE
) -> Figure:
    """Predicted step time over bandwidth, a line a method; where the winner changes.

    Work and bytes are measured, the link is simulated by the closed forms; markers are the steps
    that were measured on emulated networks, median with p10 to p90. Runs whose equivalence gate
    failed are left out.

    Args: runs: to compare; latency: s of the simulated links; over: least and greatest bytes/s.
    Raises: LabkitError, where no run has a history of several ranks.
    """
    shown = entries(runs)
    found = methods(shown)
    wins = winners(found, latency, over)
    looks = lines(each.name for each in found)
    traces = [t for each in found for t in _traces(each, looks[each.name], latency, over)]
    times = [each.seconds(edge, latency) for each in found for edge in over]
    times += [seconds for each in found for point in _points(each) for seconds in point[2:]]
    panel = Panel(
        title=f"Step time by bandwidth of the links\nfastest: {in_turn(wins)}",
        x="bandwidth of a link",
        y="time of a step",
        traces=[
            *traces,
            crosses(
                [8 * win.last for win in wins[:-1]],
                [win.method.seconds(win.last, latency) for win in wins[:-1]],
                [bits_text(win.last) for win in wins[:-1]],
                "bottom left",
            ),
        ],
        note=refusals(shown),
        always_note=bool(refusals(shown)),
        x_axis=_bandwidth_axis(*over),
        y_axis=seconds_axis(_ROOM * min(times), max(times)),
    )
    title = f"Who wins at which bandwidth · simulation · {_measured_on(found)}"
    remarks = [
        f"lines: measured compute and codec + simulated links of {seconds_text(latency)}, "
        "no overlap; markers: measured; ✕: the winner changes"
    ]
    words = [f"fastest: {in_turn(wins)}", *(_in_words(each, over) for each in found)]
    said = [*words, refusals(shown)]
    return sheet([[panel]], looks.values(), title, [*remarks, *busy(shown)], said, plot=340)


def methods(shown: Sequence[Entry]) -> list[Method]:
    """What the runs have measured, by method; medians over runs on several networks.

    Raises: LabkitError, where no run has a history of several ranks.
    """
    usable = [e for e in shown if not e.gate_failed and (e.metrics.get("workers") or 1) > 1]
    found = []
    for name, group in by_method(usable).items():
        links = [_on_a_link(e, costs) for e in group if (costs := step_costs(e.run))]
        if links:
            work, hops, nbytes = (median(column) for column in zip(*links, strict=True))
            found.append(Method(name, tuple(group), work, hops, nbytes))
    if not found:
        raise LabkitError(
            "no run to predict from: it takes a completed run on two or more workers whose "
            "equivalence gate did not fail"
        )
    return found


def winners(found: Sequence[Method], latency: float, over: tuple[float, float]) -> list[Win]:
    r"""Who is fastest from the least bandwidth to the greatest.

    Over 1/B all times are straight lines: with more bandwidth only a method with less fixed time
    can take over, at \(B = (n' - n) / (f - f')\).
    """
    first, high = over

    def fixed(each: Method) -> float:
        return each.work + latency * each.hops

    best = min(found, key=lambda each: (each.seconds(first, latency), fixed(each)))
    wins: list[Win] = []
    while True:
        edges = [
            ((other.nbytes - best.nbytes) / (fixed(best) - fixed(other)), fixed(other), place)
            for place, other in enumerate(found)
            if fixed(other) < fixed(best)
        ]
        edge, _, place = min(edges, default=(high, 0.0, 0))
        if edge >= high:
            return [*wins, Win(best, first, high)]
        if edge > first:  # a tie at the least bandwidth is no change
            wins.append(Win(best, first, edge))
            first = edge
        best = found[place]


def prediction_errors(found: Sequence[Method]) -> dict[str, float]:
    """Predicted / measured - 1 by run, each on its own emulated network."""
    errors = {}
    for each in found:
        for entry in each.runs:
            network = _switch(entry)
            if network is not None:
                measured = entry.metrics["step_ms"]["median"] / 1e3
                predicted = each.seconds(network.bandwidth, network.latency)
                errors[entry.label] = predicted / measured - 1
    return errors


def in_turn(wins: Sequence[Win]) -> str:
    """`TopK up to 1.2 Gb/s, then no compression`"""
    *before, last = wins
    said = [f"{win.method.name} up to {bits_text(win.last)}" for win in before]
    return ", then ".join([*said, last.method.name if said else f"{last.method.name} throughout"])


def bits_text(bandwidth: float) -> str:
    """Bytes/s as `1 Gb/s`."""
    bits = 8 * bandwidth
    scale, unit = next((pair for pair in _SCALES if bits >= 0.9995 * pair[0]), _SCALES[-1])
    return f"{bits / scale:.3g} {unit}"


def _on_a_link(entry: Entry, costs: StepCosts) -> tuple[float, float, float]:
    """Work in s, hops, and bytes on the busiest link."""
    size = int(entry.metrics["workers"])
    exchange = entry.metrics.get("exchange") or entry.run.experiment.get("strategy") or {}
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


def _switch(entry: Entry) -> Network | None:
    """The emulated network, where it is one switch with equal links; else None."""
    record = entry.run.experiment.get("network")
    network = Network(**record) if isinstance(record, dict) else Network.parse(record)
    plain = network is not None and network.hosts is None and network.links is None
    return network if plain else None


def _points(each: Method) -> list[tuple[str, float, float, float, float]]:
    """Label, bytes/s, s of the median step, of the p10 and of the p90; of emulated networks."""
    found = []
    for entry in each.runs:
        network, step = _switch(entry), entry.metrics["step_ms"]
        if network is not None:
            times = (step[name] / 1e3 for name in ("median", "p10", "p90"))
            found.append((entry.label, network.bandwidth, *times))
    return found


def _traces(each: Method, look: Line, latency: float, over: tuple[float, float]) -> list[Trace]:
    import pandas as pd

    grid = np.geomspace(*over, 60)
    seconds = [each.seconds(one, latency) for one in grid.tolist()]
    said = [f"{bits_text(one)}: {seconds_text(t)}" for one, t in zip(grid, seconds, strict=True)]
    shown = {"text": said, "hoverinfo": "text", "hovertemplate": "%{text}, simulated"}
    measured = [
        (8 * link, middle, low, high, f"{label}: {seconds_text(middle)}, measured")
        for label, link, middle, low, high in _points(each)
    ]
    columns = ["bits", "seconds", "seconds_low", "seconds_high", "hover"]
    table = pd.DataFrame(measured, columns=columns)
    drawn = curve((8 * grid).tolist(), seconds, look, 2, **shown)
    return [drawn, points(table, "bits", "seconds", look, size=10)] if measured else [drawn]


def _bandwidth_axis(low: float, high: float) -> Trace:
    first, last = (int(np.round(np.log10(8 * edge))) for edge in (low, high))
    ticks = [10.0**power for power in range(first, last + 1)]
    return {
        "type": "log",
        "range": [np.log10(8 * low) - 0.1, np.log10(8 * high) + 0.1],
        "tickvals": ticks,
        "ticktext": [bits_text(tick / 8) for tick in ticks],
    }


def _measured_on(found: Sequence[Method]) -> str:
    return f"measured: {clock_and_network([entry for each in found for entry in each.runs])}"


def _in_words(each: Method, over: tuple[float, float]) -> str:
    slow, fast = (seconds_text(each.seconds(edge)) for edge in over)
    return f"{each.name}: {slow} at {bits_text(over[0])}, {fast} at {bits_text(over[1])}"
