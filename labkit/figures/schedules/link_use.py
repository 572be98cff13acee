"""When which link is busy: a master's link beside the links of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import cells, towards
from labkit.figures.kit.sheet import Panel, Trace, sheet
from labkit.network import Network
from labkit.simulate import Simulation, simulate

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

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
    """A heat map an algorithm: how busy each link is over time, all on the same axis of time.

    Args: algorithms: a name of `labkit.schedules`, or several; size: ranks; nbytes: of the
    buffer; network: a name, or a `Network`; gamma: s to add one byte.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
    from labkit.figures.kit.sheet import PLOT

    found = simulations(algorithms, size, nbytes, network, gamma)
    end = max(each.seconds for each in found.values())
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
        for name, each in found.items()
    ]
    world = Network.named(network) if isinstance(network, str) else network
    title = (
        f"Links in use, {size} ranks · simulation · network {world} · buffer {bytes_text(nbytes)}"
    )
    drawn = min(MOST_LINKS, max(len(each.links) for each in found.values()))
    words = [f"{name} takes {seconds_text(s.seconds)}, {_summary(s)}" for name, s in found.items()]
    remark = f"the {drawn} busiest links" if drawn == MOST_LINKS else ""
    high = max(PLOT, LINE * drawn)
    figure = sheet([[panel] for panel in panels], [], title, [remark], words, plot=high)
    scale = {"title": {"text": "busy, %<br> ", "side": "top"}, "thickness": 12, "outlinewidth": 0}
    scale |= {"lenmode": "pixels", "len": high, "y": 1, "yanchor": "top"}
    figure.update_layout(
        coloraxis={"cmin": 0, "cmax": 100, "colorscale": towards("213,94,0"), "colorbar": scale},
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
    """Which link each algorithm leans on, and how much longer it takes for that."""
    found = simulations(algorithms, size, nbytes, network, gamma)
    least = min(each.seconds for each in found.values())
    said = []
    for name, each in found.items():
        slower = "the fastest of these"
        # A thousandth is rounding: algorithms of the same cost are equally fast.
        if each.seconds > least * 1.001:
            slower = f"{each.seconds / least:.2f} times the fastest"
        taken = f"{seconds_text(each.seconds)}, {slower}"
        said.append(Finding(f"**{name}**", said=(taken, _summary(each))))
    return sentences(said)


def simulations(
    algorithms: str | Sequence[str],
    size: int,
    nbytes: float,
    network: str | Network,
    gamma: float = 0.0,
) -> dict[str, Simulation]:
    """Each algorithm with its trace."""
    names = [algorithms] if isinstance(algorithms, str) else list(dict.fromkeys(algorithms))
    return {name: simulate(name, size, nbytes, network, gamma=gamma, trace=True) for name in names}


def _summary(each: Simulation) -> str:
    """`rank 0 out and rank 0 in are in use 50% of the time, the others 7%`"""
    if not each.seconds:
        return "no link is used"
    share = each.occupied / each.seconds
    # Links that do the same differ in the last digits.
    busiest = np.flatnonzero(share >= share.max() * (1 - 1e-9))
    who = " and ".join(each.links[place] for place in busiest)
    if len(busiest) > 2:
        who = "all links" if len(busiest) == len(share) else f"{len(busiest)} links"
    verb = "is" if len(busiest) == 1 else "are"
    said = f"{who} {verb} in use {share.max():.0%} of the time"
    others = np.delete(share, busiest)
    return said + (f", the others {others.mean():.0%}" if len(others) else "")


def _heat(each: Simulation) -> Trace:
    edges, shares = each.utilisation(BINS)
    places = np.arange(len(each.links))
    if len(places) > MOST_LINKS:
        # The busiest, but in their own order, in which neighbours stand beside each other.
        places = np.sort(np.argsort(-each.occupied, kind="stable")[:MOST_LINKS])
    return cells(
        (100 * shares[places]).round(1).astype(np.float32),
        1e3 * edges,
        [each.links[place] for place in places],
        hover="%{y}, %{x:.3g} ms: %{z:.0f} % busy",
        on={"ygap": 1},
    )
