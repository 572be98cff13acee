"""Costs of collectives: curves by buffer size, message counts, and use of links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import Line, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import cells, crosses, curve, fade_to, points
from labkit.figures.kit.panels import Panel, Trace
from labkit.figures.kit.sheet import sheet
from labkit.network import Network
from labkit.schedules import ALLREDUCE, named
from labkit.schedules.interpreter import count
from labkit.simulate import Simulation, closed_form, simulate
from labkit.simulate.fastest import Costs, costs

# Those of one switch: the others are laid out on hosts or links, which these networks have not.
ALGORITHMS = tuple(name for name, each in ALLREDUCE.items() if each.layout is None)
NETWORKS = ("100Gb-infiniband", "10GbE", "1GbE", "wan")
RANGE = (64, 2**26)  # bytes
IN_A_ROW = 2  # panels


def cost_curves(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Figure:
    """Draw simulated time over buffer size, a panel a network, and where the fastest changes.

    Markers are the simulator's, the thin lines the closed forms (`labkit.simulate.closed_form`),
    which know one switch only.

    Args: algorithms: names of `labkit.schedules.ALLREDUCE`; size: ranks; networks: names, or
    `Network`; nbytes: least and greatest size of the buffer; gamma: s to add one byte.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
    curves = costs(algorithms, size, networks, nbytes, gamma)
    looks = lines(algorithms)
    low = min(float(each.seconds.min()) for each in curves)
    high = max(float(each.seconds.max()) for each in curves)
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
        for each in curves
    ]
    rows = [panels[start : start + IN_A_ROW] for start in range(0, len(panels), IN_A_ROW)]
    title = f"Allreduce on {size} ranks · simulation"
    added = f", adding {seconds_text(gamma * 2**20)} a MiB" if gamma else ""
    remark = f"markers: simulator; thin lines: closed form{added}; ✕: where the fastest changes"
    words = [f"{each.network}: {_in_turn(each)}" for each in curves]
    return sheet(rows, looks.values(), title, [remark], words, plot=250)


def cost_reading(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Markdown:
    """Say which algorithm is fastest on each network, from which size on; see `cost_curves`."""
    findings = []
    for each in costs(algorithms, size, networks, nbytes, gamma):
        last = dict(zip(algorithms, each.seconds[:, -1].tolist(), strict=True))
        best, worst = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        largest = (
            f"At {bytes_text(nbytes[1])} {worst} takes {last[worst] / last[best]:.2f} times as "
            f"long as {best}"
        )
        details = (f"{_in_turn(each)}. {largest}",)
        findings.append(Finding(f"**{each.network}**, {size} ranks", details=details))
    return sentences(findings)


def _traces(each: Costs, looks: dict[str, Line], size: int, gamma: float) -> list[Trace]:
    network, sizes, traces = each.network, each.nbytes.tolist(), []
    for (name, look), seconds in zip(looks.items(), each.seconds, strict=True):
        if network.hosts is None and network.links is None and not network.slow:
            form = [closed_form(name, size, n, network, gamma) for n in sizes]
            traces.append(curve(sizes, form, look))
        details = [
            f"{bytes_text(n)}: {seconds_text(t)}" for n, t in zip(sizes, seconds, strict=True)
        ]
        table = pd.DataFrame({"bytes": sizes, "seconds": seconds, "hover": details})
        # Every other size: with all of them markers hide the line of the closed form.
        traces.append(points(table[::2], "bytes", "seconds", look, size=6))
    edges = [stretch.last for stretch in each.fastest[:-1]]
    best = each.seconds.min(axis=0)
    # Between the sizes as the axes show it: straight where both are logarithmic.
    height = np.exp(np.interp(np.log(edges), np.log(each.nbytes), np.log(best)))
    hover = [
        f"{bytes_text(one.last)}: {' or '.join(one.algorithms)} → {' or '.join(other.algorithms)}"
        for one, other in pairwise(each.fastest)
    ]
    texts = [bytes_text(edge) for edge in edges]
    changes = crosses(edges, height, texts, "bottom right", hovertext=hover, hoverinfo="text")
    return [*traces, changes]


def _envelope(each: Costs) -> str:
    """Return `butterfly up to 23 KiB, then ring`."""
    names = [" = ".join(stretch.algorithms) for stretch in each.fastest]
    if len(names) == 1:
        return f"fastest: {names[0]}"
    return "fastest: " + " → ".join(names)


def _in_turn(each: Costs) -> str:
    *before, last = each.fastest
    details = [f"{' and '.join(s.algorithms)} up to {bytes_text(s.last)}" for s in before]
    name = " and ".join(last.algorithms)
    return "fastest is " + ", then ".join([*details, name if details else f"{name} throughout"])


def counts_table(
    algorithms: Iterable[str] = tuple(ALLREDUCE), sizes: Iterable[int] = (2, 4, 8)
) -> pd.DataFrame:
    """Return a row an algorithm and number of ranks: counts by schedule and by formula.

    `volume` and `busiest_rank` are bytes sent, by all and by the rank that sends most, in units of
    the buffer n; `equal` holds every single rank against the formula.

    Args: algorithms: names of `labkit.schedules`; sizes: numbers of ranks.
    Raises: InvalidInput, for a name that does not exist.
    """
    names, ranks = list(algorithms), list(sizes)
    return pd.DataFrame([_row(name, size) for name in names for size in ranks])


def _row(name: str, size: int) -> dict[str, str | int | float | bool]:
    counted, formula = count(named(name).schedule(size), size), named(name).counts(size)
    sent = counted.bytes(1.0)
    return {
        "algorithm": name,
        "ranks": size,
        "messages": int(counted.messages.sum()),
        "messages_formula": int(formula.messages.sum()),
        "volume": float(sent.sum()),
        "volume_formula": float(formula.bytes(1.0).sum()),
        "busiest_rank": float(sent.max()),
        # Rank by rank: totals may agree where ranks do not.
        "equal": counted == formula,
    }


def counts_reading(table: pd.DataFrame) -> Markdown:
    """Say whether all rows of `counts_table` agree, and which algorithms load a rank most."""
    wrong = table[~table["equal"]]
    findings = [f"{len(table) - len(wrong)} of {len(table)} rows equal the formula, rank by rank"]
    findings += [
        f"**{row.algorithm}** on {row.ranks} ranks does not: {row.messages} messages counted, "
        f"{row.messages_formula} by the formula"
        for row in wrong.itertuples()
    ]
    largest = table[table["ranks"] == table["ranks"].max()]
    most, least = largest["busiest_rank"].max(), largest["busiest_rank"].min()
    heavy = ", ".join(largest[largest["busiest_rank"] == most]["algorithm"])
    light = ", ".join(largest[largest["busiest_rank"] == least]["algorithm"])
    findings.append(
        f"On {largest['ranks'].iloc[0]} ranks the busiest rank sends {least:.3g} n with {light}, "
        f"and {most:.3g} n with {heavy}"
    )
    return sentences(map(Finding, findings))


BINS = 120
MOST_LINKS = 40  # of more, the busiest are drawn
LINE = 13  # pixels a link


def link_utilisation(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float = 2**20,
    network: str | Network = "1GbE",
    gamma: float = 0.0,
) -> Figure:
    """Draw the use of each link over time as a heat map an algorithm.

    Args: algorithms: a name of `labkit.schedules`, or several; size: ranks; nbytes: of the
    buffer; network: a name, or a `Network`; gamma: s to add one byte.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
    from labkit.figures.kit.panels import PLOT

    by_name = simulations(algorithms, size, nbytes, network, gamma)
    end = max(each.seconds for each in by_name.values())
    panels = [
        Panel(
            title=f"{name}: {seconds_text(each.seconds)}\n{_summary(each)}",
            x="time, ms",
            y="",
            traces=[_heat(each)],
            x_axis={"range": [0, 1e3 * end], "showgrid": False},
            y_axis={"autorange": "reversed", "nticks": MOST_LINKS, "tickfont": {"size": 10}}
            | {"showgrid": False, "type": "category"},
            link="time",
        )
        for name, each in by_name.items()
    ]
    world = Network.named(network) if isinstance(network, str) else network
    title = (
        f"Links in use, {size} ranks · simulation · network {world} · buffer {bytes_text(nbytes)}"
    )
    drawn = min(MOST_LINKS, max(len(each.links) for each in by_name.values()))
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


def link_reading(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float = 2**20,
    network: str | Network = "1GbE",
    gamma: float = 0.0,
) -> Markdown:
    """Name the busiest links of each algorithm, and compare the times."""
    by_name = simulations(algorithms, size, nbytes, network, gamma)
    least = min(each.seconds for each in by_name.values())
    findings = []
    for name, each in by_name.items():
        slower = "the fastest of these"
        # A thousandth is rounding: algorithms of the same cost are equally fast.
        if each.seconds > least * 1.001:
            slower = f"{each.seconds / least:.2f} times the fastest"
        taken = f"{seconds_text(each.seconds)}, {slower}"
        findings.append(Finding(f"**{name}**", details=(taken, _summary(each))))
    return sentences(findings)


def simulations(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float,
    network: str | Network,
    gamma: float = 0.0,
) -> dict[str, Simulation]:
    """Return the simulation of each algorithm, with its trace."""
    names = [algorithms] if isinstance(algorithms, str) else list(dict.fromkeys(algorithms))
    return {name: simulate(name, size, nbytes, network, gamma=gamma, trace=True) for name in names}


def _summary(each: Simulation) -> str:
    """Return `rank 0 out and rank 0 in are in use 50% of the time, the others 7%`."""
    if not each.seconds:
        return "no link is used"
    share = each.occupied / each.seconds
    # Links that do the same differ in the last digits.
    busiest = np.flatnonzero(share >= share.max() * (1 - 1e-9))
    who = " and ".join(each.links[place] for place in busiest)
    if len(busiest) > 2:
        who = "all links" if len(busiest) == len(share) else f"{len(busiest)} links"
    verb = "is" if len(busiest) == 1 else "are"
    details = f"{who} {verb} in use {share.max():.0%} of the time"
    others = np.delete(share, busiest)
    return details + (f", the others {others.mean():.0%}" if len(others) else "")


def _heat(each: Simulation) -> Trace:
    edges, shares = each.utilisation(BINS)
    places = np.arange(len(each.links))
    if len(places) > MOST_LINKS:
        # The busiest links keep their order, so that neighbours stay side by side.
        places = np.sort(np.argsort(-each.occupied, kind="stable")[:MOST_LINKS])
    return cells(
        (100 * shares[places]).round(1).astype(np.float32),
        1e3 * edges,
        [each.links[place] for place in places],
        hover="%{y}, %{x:.3g} ms: %{z:.0f} % busy",
        on={"ygap": 1},
    )
