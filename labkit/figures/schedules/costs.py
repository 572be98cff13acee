"""What an allreduce costs by size of its buffer: algorithms against each other, on networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.entries import INK, Line, lines
from labkit.figures.kit.finding import Markdown
from labkit.figures.kit.panels import Panel
from labkit.network import Network
from labkit.network.topology import Seconds
from labkit.simulate import closed_form, simulate

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

ALGORITHMS = ("all_to_all", "master_worker", "tree", "butterfly", "rabenseifner", "ring")
NETWORKS = ("100Gb-infiniband", "10GbE", "1GbE", "wan")
RANGE = (64, 2**26)  # bytes
IN_A_ROW = 2  # panels
Times: TypeAlias = Callable[[float], Seconds]  # bytes -> seconds of each algorithm
AS_LONG = 1e-9  # relative: times that differ by less are the same


@dataclass(frozen=True)
class Stretch:
    """Sizes from `first` to `last` bytes, on which these algorithms are the fastest."""

    algorithms: tuple[str, ...]
    first: float
    last: float


@dataclass(frozen=True, eq=False)
class Costs:
    """Simulated times on one network: shape (algorithms, sizes), s; who is fastest where."""

    network: Network
    nbytes: Seconds
    seconds: Seconds
    fastest: list[Stretch]


def cost_curves(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Figure:
    """Simulated time over size of the buffer, a panel a network; where the fastest changes.

    Markers are the simulator's, the thin lines the closed forms (`labkit.simulate.closed_form`),
    which know one switch only.

    Args: algorithms: names of `labkit.schedules.ALLREDUCE`; size: ranks; networks: names, or
    `Network`; nbytes: least and greatest size of the buffer; gamma: s to add one byte.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
    from labkit.figures.kit.canvas import draw

    found = costs(algorithms, size, networks, nbytes, gamma)
    looks = lines(algorithms)
    low = min(float(each.seconds.min()) for each in found)
    high = max(float(each.seconds.max()) for each in found)
    panels = [
        Panel(
            title=f"{each.network}\n{_envelope(each)}",
            x="size of the buffer",
            y="time of the allreduce",
            traces=_traces(each, looks, size, gamma),
            x_axis=bytes_axis(*nbytes),
            y_axis=seconds_axis(low, high),
            link="bytes",
        )
        for each in found
    ]
    rows = [panels[start : start + IN_A_ROW] for start in range(0, len(panels), IN_A_ROW)]
    title = f"Allreduce on {size} ranks · simulation"
    added = f", adding {seconds_text(gamma * 2**20)} a MiB" if gamma else ""
    remark = f"markers: simulator; thin lines: closed form{added}; ✕: where the fastest changes"
    return draw(rows, list(looks.values()), title, remark, _in_words(title, found), plot=250)


def cost_reading(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Markdown:
    """On each network which algorithm is fastest from which size on; arguments of `cost_curves`."""
    said = []
    for each in costs(algorithms, size, networks, nbytes, gamma):
        last = dict(zip(algorithms, each.seconds[:, -1].tolist(), strict=True))
        best, worst = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        said.append(
            f"- **{each.network}**, {size} ranks: {_in_turn(each)}. At {bytes_text(nbytes[1])} "
            f"{worst} takes {last[worst] / last[best]:.2f} times as long as {best}."
        )
    return Markdown("\n".join(said))


def costs(
    algorithms: Sequence[str],
    size: int,
    networks: Sequence[str | Network],
    nbytes: tuple[float, float],
    gamma: float = 0.0,
) -> list[Costs]:
    """Simulate all algorithms on all networks; two sizes an octave of the buffer."""
    if size < 2 or not 0 < nbytes[0] < nbytes[1] or not algorithms or not networks:
        raise InvalidInput(
            f"size={size}, nbytes={tuple(nbytes)}, {len(algorithms)} algorithms, {len(networks)} "
            f"networks: give two ranks or more, 0 < least bytes < greatest, and one name at least"
        )
    return [_costs(algorithms, size, _named(each), nbytes, gamma) for each in networks]


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
        each = (simulate(name, size, count, network, gamma=gamma) for name in algorithms)
        return np.array([one.seconds for one in each])

    points = 1 + max(1, round(2 * math.log2(nbytes[1] / nbytes[0])))
    grid = np.geomspace(*nbytes, points)
    seconds = np.stack([times(count) for count in grid.tolist()], axis=1)
    return Costs(network, grid, seconds, _stretches(algorithms, grid.tolist(), seconds, times))


def _stretches(
    algorithms: Sequence[str], grid: list[float], seconds: Seconds, times: Times
) -> list[Stretch]:
    """Follow who is fastest along the sizes; of those that are so together, as long as they are."""
    first, best = grid[0], _fastest(seconds[:, 0])
    found = []
    for place in range(1, len(grid)):
        there = _fastest(seconds[:, place])
        if both := [each for each in best if each in there]:
            best = both
            continue
        edge = _crossing(times, best[0], there[0], grid[place - 1], grid[place])
        found.append(Stretch(tuple(algorithms[each] for each in best), first, edge))
        first, best = edge, there
    return [*found, Stretch(tuple(algorithms[each] for each in best), first, grid[-1])]


def _fastest(seconds: Seconds) -> list[int]:
    """Places of all that are as fast as the fastest."""
    return [int(place) for place in np.flatnonzero(seconds <= seconds.min() * (1 + AS_LONG))]


def _crossing(times: Times, left: int, right: int, low: float, high: float) -> float:
    """The size between two at which the one that was faster is overtaken: halving, on a log."""
    for _ in range(30):
        middle = math.sqrt(low * high)
        seconds = times(middle)
        if seconds[left] <= seconds[right]:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _traces(each: Costs, looks: dict[str, Line], size: int, gamma: float) -> list[dict[str, Any]]:
    traces = []
    for (name, line), seconds in zip(looks.items(), each.seconds, strict=True):
        if each.network.hosts is None and each.network.links is None and not each.network.slow:
            form = [closed_form(name, size, n, each.network, gamma) for n in each.nbytes.tolist()]
            thin = {"mode": "lines", "line": {"color": line.color, "dash": line.dash, "width": 1}}
            hidden = {"hoverinfo": "skip", "showlegend": False}
            traces.append({"x": each.nbytes, "y": form} | thin | hidden | line.style)
        text = [
            f"{bytes_text(n)}: {seconds_text(t)}"
            for n, t in zip(each.nbytes.tolist(), seconds.tolist(), strict=True)
        ]
        traces.append(
            {
                "x": each.nbytes[::2],
                "y": seconds[::2],
                "mode": "markers",
                "marker": {"color": line.color, "symbol": line.symbol, "size": 6},
                "text": text[::2],
                "hovertemplate": "%{text}",
                "showlegend": False,
            }
            | line.style
        )
    return [*traces, _crossovers(each)]


def _crossovers(each: Costs) -> dict[str, Any]:
    """A cross where the fastest changes, and at which size."""
    edges = [stretch.last for stretch in each.fastest[:-1]]
    best = each.seconds.min(axis=0)
    height = np.exp(np.interp(np.log(edges), np.log(each.nbytes), np.log(best)))
    hover = [
        f"{bytes_text(one.last)}: {' or '.join(one.algorithms)} → {' or '.join(other.algorithms)}"
        for one, other in zip(each.fastest, each.fastest[1:], strict=False)
    ]
    return {
        "x": edges,
        "y": height,
        "mode": "markers+text",
        "marker": {"symbol": "x-thin", "size": 13, "line": {"color": INK, "width": 3}},
        "text": [bytes_text(edge) for edge in edges],
        "textposition": "bottom right",
        "textfont": {"size": 12, "color": INK},
        "hovertext": hover,
        "hoverinfo": "text",
        "showlegend": False,
    }


def _envelope(each: Costs) -> str:
    """`butterfly up to 23 KiB, then ring`"""
    names = [" = ".join(stretch.algorithms) for stretch in each.fastest]
    if len(names) == 1:
        return f"fastest: {names[0]}"
    return "fastest: " + " → ".join(names)


def _in_turn(each: Costs) -> str:
    *before, last = each.fastest
    said = [f"{' and '.join(s.algorithms)} up to {bytes_text(s.last)}" for s in before]
    name = " and ".join(last.algorithms)
    return "fastest is " + ", then ".join([*said, name if said else f"{name} throughout"])


def _in_words(title: str, found: Sequence[Costs]) -> str:
    return ". ".join([title, *(f"{each.network}: {_in_turn(each)}" for each in found)]) + "."
