"""Costs of collective algorithms: time by buffer size, message counts, and link utilisation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Finding, LineStyle, Markdown, lines, sentences
from labkit.figures.kit.marks import cells, crosses, curve, fade_to, points
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.schedules import ALLREDUCE, get_collective
from labkit.schedules.interpreter import count_messages
from labkit.simulate import Simulation, closed_form, simulate
from labkit.simulate.simulation import Costs, costs

# `ALGORITHMS` names the algorithms that work on a single switch. Other algorithms need a layout of
# hosts or links.
ALGORITHMS = tuple(name for name, algorithm in ALLREDUCE.items() if algorithm.layout is None)
NETWORKS = ("100Gb-infiniband", "10GbE", "1GbE", "wan")
RANGE = (64, 2**26)  # least and greatest buffer size in bytes
IN_A_ROW = 2  # number of panels side by side in the figure


def cost_curves(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Figure:
    """Draw the simulated time over the buffer size, and mark where the fastest algorithm changes.

    Markers are simulated times. Thin lines are closed-form costs (`labkit.simulate.closed_form`),
    which assume a single switch.

    Args:
        algorithms: Names of allreduce algorithms in `labkit.schedules.ALLREDUCE`.
        size: Number of ranks.
        networks: Names of networks, or `Network` objects.
        nbytes: Least and greatest size of the buffer in bytes.
        gamma: Seconds to add one received byte to a byte of the rank's own buffer (γ).

    Raises:
        InvalidInput: A name does not exist, or a number is out of range.
    """
    curves = costs(algorithms, size, networks, nbytes, gamma)
    looks = lines(algorithms)
    low = min(float(costs_of_network.seconds.min()) for costs_of_network in curves)
    high = max(float(costs_of_network.seconds.max()) for costs_of_network in curves)
    panels = [
        Panel(
            title=f"{costs_of_network.network}\n{_fastest_names(costs_of_network)}",
            x="buffer size",
            y="time of the allreduce",
            traces=_traces(costs_of_network, looks, size, gamma),
            x_axis=bytes_axis(*nbytes),
            y_axis=seconds_axis(low, high),
            link="bytes",
        )
        for costs_of_network in curves
    ]
    rows = [panels[start : start + IN_A_ROW] for start in range(0, len(panels), IN_A_ROW)]
    title = f"Allreduce on {size} ranks · simulation"
    added = f", addition {seconds_text(gamma * 2**20)} per MiB" if gamma else ""
    remark = (
        f"markers: simulator; thin lines: closed form{added}; ✕: another algorithm becomes fastest"
    )
    words = [
        f"{costs_of_network.network}: {_fastest_by_size(costs_of_network)}"
        for costs_of_network in curves
    ]
    return sheet(rows, looks.values(), title, [remark], words, plot=250)


def summarize_cost(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Markdown:
    """Name the fastest algorithm by buffer size on each network; arguments as for `cost_curves`."""
    findings = []
    for costs_of_network in costs(algorithms, size, networks, nbytes, gamma):
        last = dict(zip(algorithms, costs_of_network.seconds[:, -1].tolist(), strict=True))
        best, worst = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        largest = (
            f"At {bytes_text(nbytes[1])}, {worst} takes {last[worst] / last[best]:.2f} times as "
            f"long as {best}"
        )
        details = (f"{_fastest_by_size(costs_of_network)}. {largest}",)
        findings.append(Finding(f"**{costs_of_network.network}**, {size} ranks", details=details))
    return sentences(findings)


def _traces(
    costs_of_network: Costs, looks: dict[str, LineStyle], size: int, gamma: float
) -> list[Trace]:
    network, sizes, traces = costs_of_network.network, costs_of_network.nbytes.tolist(), []
    for (name, look), seconds in zip(looks.items(), costs_of_network.seconds, strict=True):
        if network.hosts is None and network.links is None and not network.stragglers:
            form = [closed_form(name, size, n, network, gamma) for n in sizes]
            traces.append(curve(sizes, form, look))
        details = [
            f"{bytes_text(n)}: {seconds_text(t)}" for n, t in zip(sizes, seconds, strict=True)
        ]
        table = pd.DataFrame({"bytes": sizes, "seconds": seconds, "hover": details})
        # Only every second simulated size has a marker. More markers would hide the line of the
        # closed form.
        traces.append(points(table[::2], "bytes", "seconds", look, size=6))
    edges = [stretch.last for stretch in costs_of_network.fastest[:-1]]
    best = costs_of_network.seconds.min(axis=0)
    # The figure has logarithmic axes, so the interpolation between simulated sizes uses logarithms.
    height = np.exp(np.interp(np.log(edges), np.log(costs_of_network.nbytes), np.log(best)))
    hover = [
        f"{bytes_text(one.last)}: {' or '.join(one.algorithms)} → {' or '.join(other.algorithms)}"
        for one, other in pairwise(costs_of_network.fastest)
    ]
    texts = [bytes_text(edge) for edge in edges]
    changes = crosses(edges, height, texts, "bottom right", hovertext=hover, hoverinfo="text")
    return [*traces, changes]


def _fastest_names(costs_of_network: Costs) -> str:
    """List the fastest algorithms from small to large buffers: `fastest: butterfly → ring`."""
    names = [" = ".join(stretch.algorithms) for stretch in costs_of_network.fastest]
    if len(names) == 1:
        return f"fastest: {names[0]}"
    return "fastest: " + " → ".join(names)


def _fastest_by_size(costs_of_network: Costs) -> str:
    *before, last = costs_of_network.fastest
    details = [f"{' and '.join(s.algorithms)} up to {bytes_text(s.last)}" for s in before]
    name = " and ".join(last.algorithms)
    return "fastest is " + ", then ".join([*details, name if details else f"{name} throughout"])


def counts_table(
    algorithms: Iterable[str] = tuple(ALLREDUCE), sizes: Iterable[int] = (2, 4, 8)
) -> pd.DataFrame:
    """Return one row per algorithm and rank count: message counts of the schedule and the formula.

    The column `volume` counts the bytes sent by all ranks together. The column `busiest_rank`
    counts the bytes of the rank that sends most. The columns `volume` and `busiest_rank` use the
    buffer size as their unit. The column `equal` states whether schedule and formula give the same
    counts for every rank.

    Args:
        algorithms: Names of allreduce algorithms in `labkit.schedules`.
        sizes: Numbers of ranks. The table has one row for each algorithm and each number of ranks.

    Raises:
        InvalidInput: A name in `algorithms` does not exist.
    """
    names, ranks = list(algorithms), list(sizes)
    return pd.DataFrame([_row(name, size) for name in names for size in ranks])


def _row(name: str, size: int) -> dict[str, str | int | float | bool]:
    counted, formula = (
        count_messages(get_collective(name).schedule(size), size),
        get_collective(name).counts(size),
    )
    sent = counted.bytes(1.0)
    return {
        "algorithm": name,
        "ranks": size,
        "messages": int(counted.messages.sum()),
        "messages_formula": int(formula.messages.sum()),
        "volume": float(sent.sum()),
        "volume_formula": float(formula.bytes(1.0).sum()),
        "busiest_rank": float(sent.max()),
        # The message counts are compared rank by rank, because totals may agree although ranks
        # differ.
        "equal": counted == formula,
    }


def summarize_counts(table: pd.DataFrame) -> Markdown:
    """Summarize whether schedules match formulas, and with which algorithms one rank sends most."""
    wrong = table[~table["equal"]]
    findings = [f"{len(table) - len(wrong)} of {len(table)} rows equal the formula on every rank"]
    findings += [
        f"**{row.algorithm}** on {row.ranks} ranks differs: its schedule has {row.messages} "
        f"messages, the formula gives {row.messages_formula}"
        for row in wrong.itertuples()
    ]
    largest = table[table["ranks"] == table["ranks"].max()]
    most, least = largest["busiest_rank"].max(), largest["busiest_rank"].min()
    heavy = ", ".join(largest[largest["busiest_rank"] == most]["algorithm"])
    light = ", ".join(largest[largest["busiest_rank"] == least]["algorithm"])
    findings.append(
        f"On {largest['ranks'].iloc[0]} ranks, a rank sends up to {least:.3g} buffers with {light}"
        f", and {most:.3g} buffers with {heavy}"
    )
    return sentences(map(Finding, findings))


BINS = 120  # number of time intervals of the heat map
# Greatest number of links in a panel; if there are more, only the busiest are drawn.
MOST_LINKS = 40
LINE = 13  # height in pixels of a link's row in the heat map


def link_utilisation(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float = 2**20,
    network: str | Network = "1GbE",
    gamma: float = 0.0,
) -> Figure:
    """Draw the utilisation of each link over time, as one heat map per algorithm.

    Args:
        algorithms: One or several names of collective algorithms in `labkit.schedules`.
        size: Number of ranks.
        nbytes: Size of the buffer in bytes.
        network: Name of a network, or a `Network`.
        gamma: Seconds to add one received byte to a byte of the rank's own buffer (γ).

    Raises:
        InvalidInput: A name does not exist, or a number is out of range.
    """
    from labkit.figures.kit.panels import PLOT

    by_name = simulations(algorithms, size, nbytes, network, gamma)
    end = max(simulation.seconds for simulation in by_name.values())
    panels = [
        Panel(
            title=f"{name}: {seconds_text(simulation.seconds)}\n{_summary(simulation)}",
            x="time, ms",
            y="",
            traces=[_heat(simulation)],
            x_axis={"range": [0, 1e3 * end], "showgrid": False},
            y_axis={"autorange": "reversed", "nticks": MOST_LINKS, "tickfont": {"size": 10}}
            | {"showgrid": False, "type": "category"},
            link="time",
        )
        for name, simulation in by_name.items()
    ]
    world = Network.named(network) if isinstance(network, str) else network
    title = (
        f"Link utilisation, {size} ranks · simulation · network {world} · "
        f"buffer {bytes_text(nbytes)}"
    )
    drawn = min(MOST_LINKS, max(len(simulation.links) for simulation in by_name.values()))
    words = [
        f"{name} takes {seconds_text(s.seconds)}, {_summary(s)}" for name, s in by_name.items()
    ]
    remark = f"the {drawn} busiest links" if drawn == MOST_LINKS else ""
    high = max(PLOT, LINE * drawn)
    figure = sheet([[panel] for panel in panels], [], title, [remark], words, plot=high)
    scale = {"title": {"text": "busy, %<br> ", "side": "top"}, "thickness": 12, "outlinewidth": 0}
    scale |= {"lenmode": "pixels", "len": high, "y": 1, "yanchor": "top"}
    figure.update_layout(
        coloraxis={"cmin": 0, "cmax": 100, "colorscale": fade_to("213,94,0"), "colorbar": scale},
        margin={"l": 90, "r": 86, "b": 8},
        height=figure.layout.height + 8,
    )
    return figure


def summarize_link(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float = 2**20,
    network: str | Network = "1GbE",
    gamma: float = 0.0,
) -> Markdown:
    """Name each algorithm's time and busiest links; arguments as for `link_utilisation`."""
    by_name = simulations(algorithms, size, nbytes, network, gamma)
    least = min(simulation.seconds for simulation in by_name.values())
    findings = []
    for name, simulation in by_name.items():
        slower = "the fastest algorithm"
        # Simulated times of equally fast algorithms may differ by rounding, so the comparison has a
        # tolerance.
        if simulation.seconds > least * 1.001:
            slower = f"{simulation.seconds / least:.2f} times the fastest"
        time_text = f"{seconds_text(simulation.seconds)}, {slower}"
        findings.append(Finding(f"**{name}**", details=(time_text, _summary(simulation))))
    return sentences(findings)


def simulations(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float,
    network: str | Network,
    gamma: float = 0.0,
) -> dict[str, Simulation]:
    """Return the simulation of each algorithm, by algorithm name, with a trace of its messages."""
    names = [algorithms] if isinstance(algorithms, str) else list(dict.fromkeys(algorithms))
    return {name: simulate(name, size, nbytes, network, gamma=gamma, trace=True) for name in names}


def _summary(simulation: Simulation) -> str:
    """Describe how busy links are: `rank 0 out is in use 50% of the time, the others 7%`."""
    if not simulation.seconds:
        return "no link is used"
    share = simulation.occupied / simulation.seconds
    # The shares of equally busy links may differ by rounding, so the comparison has a tolerance.
    busiest = np.flatnonzero(share >= share.max() * (1 - 1e-9))
    links = " and ".join(simulation.links[place] for place in busiest)
    if len(busiest) > 2:
        links = "all links" if len(busiest) == len(share) else f"{len(busiest)} links"
    verb = "is" if len(busiest) == 1 else "are"
    details = f"{links} {verb} in use {share.max():.0%} of the time"
    others = np.delete(share, busiest)
    return details + (f", the others {others.mean():.0%}" if len(others) else "")


def _heat(simulation: Simulation) -> Trace:
    edges, shares = simulation.utilisation(BINS)
    places = np.arange(len(simulation.links))
    if len(places) > MOST_LINKS:
        # The busiest links keep the order of all links. Neighbouring links therefore stay side by
        # side.
        places = np.sort(np.argsort(-simulation.occupied, kind="stable")[:MOST_LINKS])
    return cells(
        (100 * shares[places]).round(1).astype(np.float32),
        1e3 * edges,
        [simulation.links[place] for place in places],
        hover="%{y}, %{x:.3g} ms: %{z:.0f} % busy",
        on={"ygap": 1},
    )
