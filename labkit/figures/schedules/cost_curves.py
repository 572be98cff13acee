"""What an allreduce costs by size of its buffer: algorithms against each other, on networks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.units import bytes_axis, bytes_text, seconds_axis, seconds_text
from labkit.figures.kit.entries import Line, lines
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.marks import crosses, curve, points
from labkit.figures.kit.sheet import Panel, Trace, sheet
from labkit.network import Network
from labkit.schedules import ALLREDUCE
from labkit.simulate import closed_form
from labkit.simulate.fastest import Costs, costs

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

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
    """Simulated time over size of the buffer, a panel a network; where the fastest changes.

    Markers are the simulator's, the thin lines the closed forms (`labkit.simulate.closed_form`),
    which know one switch only.

    Args: algorithms: names of `labkit.schedules.ALLREDUCE`; size: ranks; networks: names, or
    `Network`; nbytes: least and greatest size of the buffer; gamma: s to add one byte.
    Raises: InvalidInput, for names or numbers that cannot be.
    """
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
    words = [f"{each.network}: {_in_turn(each)}" for each in found]
    return sheet(rows, looks.values(), title, [remark], words, plot=250)


def cost_reading(
    algorithms: Sequence[str] = ALGORITHMS,
    size: int = 8,
    networks: Sequence[str | Network] = NETWORKS,
    nbytes: tuple[float, float] = RANGE,
    gamma: float = 0.0,
) -> Markdown:
    """Say which algorithm is fastest on each network, from which size on; see `cost_curves`."""
    found = []
    for each in costs(algorithms, size, networks, nbytes, gamma):
        last = dict(zip(algorithms, each.seconds[:, -1].tolist(), strict=True))
        best, worst = min(last, key=last.__getitem__), max(last, key=last.__getitem__)
        largest = (
            f"At {bytes_text(nbytes[1])} {worst} takes {last[worst] / last[best]:.2f} times as "
            f"long as {best}"
        )
        said = (f"{_in_turn(each)}. {largest}",)
        found.append(Finding(f"**{each.network}**, {size} ranks", said=said))
    return sentences(found)


def _traces(each: Costs, looks: dict[str, Line], size: int, gamma: float) -> list[Trace]:
    import pandas as pd

    network, sizes, traces = each.network, each.nbytes.tolist(), []
    for (name, look), seconds in zip(looks.items(), each.seconds, strict=True):
        if network.hosts is None and network.links is None and not network.slow:
            form = [closed_form(name, size, n, network, gamma) for n in sizes]
            traces.append(curve(sizes, form, look))
        said = [f"{bytes_text(n)}: {seconds_text(t)}" for n, t in zip(sizes, seconds, strict=True)]
        table = pd.DataFrame({"bytes": sizes, "seconds": seconds, "hover": said})
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
