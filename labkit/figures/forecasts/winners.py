"""Who is fastest over bandwidth, latency and workers, and by how much: a map with a slider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.units import bits_text, seconds_text
from labkit.figures.kit.entries import PALETTE, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.panels import Trace
from labkit.forecast.study import Place

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.frames import Animation

GAIN = 0.05  # of the time of the way that is held against: less is no gain
CELL, AXIS = 34, 56  # pixels of a row, and of the axis above


def winners_table(places: Iterable[Place], usual: str) -> pd.DataFrame:
    """A row a place: latency, workers, bandwidth, who is fastest, and its gain over the usual way.

    `gain` is the share of the usual way's time that is saved; where it is below 5 %, the usual way
    counts as the winner.

    Raises: InvalidInput, where the usual way is not among those of the map.
    """
    import pandas as pd

    rows = []
    for place in places:
        if usual not in place.seconds:
            known = ", ".join(place.seconds)
            raise InvalidInput(f"usual={usual!r} is not on this map; allowed: {known}")
        best = min(place.seconds, key=lambda name: place.seconds[name])
        gain = 1 - place.seconds[best] / place.seconds[usual]
        told = ", ".join(f"{name} {seconds_text(s)}" for name, s in place.seconds.items())
        where = f"{place.workers:,} workers, {bits_text(place.bandwidth)}"
        rows.append(
            {"latency": place.latency, "workers": place.workers, "bandwidth": place.bandwidth}
            | {"winner": best if gain >= GAIN else usual, "gain": max(gain, 0.0)}
            | {"hover": safe_text(f"{where}, {seconds_text(place.latency)}: {told}")}
        )
    return pd.DataFrame(rows)


def winners_map(places: Sequence[Place], usual: str, of: str, where: str = "") -> Animation:
    """Cells in the colour of who is fastest, with the share of time that it saves.

    Bandwidth runs to the right, workers upwards, latency by the slider. A way that saves less than
    5 % of the usual one's time does not count as faster.

    Args:
        places: of `Study.map`.
        usual: the way that others are held against.
        of: what is trained, in words.
        where: what else is to be known of the machines.
    """
    from labkit.figures.kit.canvas import HEAD
    from labkit.figures.kit.frames import CONTROLS, LEGEND, played

    names = list(places[0].seconds)
    table = winners_table(places, usual)
    latencies = list(dict.fromkeys(table["latency"]))
    bandwidths, workers = (list(dict.fromkeys(table[c])) for c in ("bandwidth", "workers"))
    states = [
        [_cells(table[table["latency"] == latency], names, bandwidths, workers)]
        for latency in latencies
    ]
    height = CELL * len(workers) + AXIS
    layout: Trace = {
        "height": height,
        "margin": {"t": HEAD, "b": LEGEND + CONTROLS, "l": 76, "r": 16, "pad": 0},
        # Above, for buttons and slider are below.
        "xaxis": {"title": "bandwidth of a link", "type": "category", "side": "top"},
        "yaxis": {"title": "workers", "type": "category", "domain": [0, 1 - AXIS / height]},
    }
    legend = [_legend(name, place) for place, name in enumerate(names)]
    title = f"Who is fastest · forecast · {of}"
    found = winners_findings(places, usual)
    alt = ". ".join([title, where, *(each.sentence for each in found)])
    rows = table.drop(columns="hover").assign(
        latency=table["latency"].map(seconds_text),
        bandwidth=table["bandwidth"].map(bits_text),
        gain=table["gain"].map("{:.0%}".format),
    )
    return played(
        legend,
        states,
        layout,
        title,
        alt,
        rows.to_html(index=False),
        "latency ",
        names=[*map(seconds_text, latencies)],
    )


def winners_reading(places: Sequence[Place], usual: str) -> Markdown:
    """In how many places somebody gains, who, and where it gains most."""
    return sentences(winners_findings(places, usual))


def winners_findings(places: Sequence[Place], usual: str) -> list[Finding]:
    """In how many places somebody gains, who, and where most."""
    table = winners_table(places, usual)
    gains = table[table["winner"] != usual]
    found = [
        Finding(
            f"Another way than **{usual}** saves at least {GAIN:.0%} of the time in",
            said=(f"{len(gains)} of {len(table)} places",),
        )
    ]
    for name, own in gains.groupby("winner", sort=False):
        top = own.loc[own["gain"].idxmax()]
        most = f"{top['workers']:,} workers, {bits_text(top['bandwidth'])}, "
        said = f"most at {most}{seconds_text(top['latency'])}: {top['gain']:.0%}"
        found.append(Finding(f"**{name}** is fastest in", said=(f"{len(own)} of them", said)))
    return found


def _cells(
    own: pd.DataFrame, names: list[str], bandwidths: list[float], workers: list[int]
) -> Trace:
    """One frame: a cell a place."""
    by: Mapping[tuple[int, float], Mapping[str, object]] = {
        (row["workers"], row["bandwidth"]): row for row in own.to_dict("records")
    }
    rows = [[by[count, each] for each in bandwidths] for count in workers]
    count = len(names)
    steps = np.repeat(np.arange(count + 1) / count, 2)[1:-1]
    colors = [PALETTE[place % len(PALETTE)] for place in range(count) for _ in range(2)]
    return {
        "type": "heatmap",
        "x": [bits_text(each) for each in bandwidths],
        "y": [f"{each:,}" for each in workers],
        "z": [[names.index(str(cell["winner"])) for cell in row] for row in rows],
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": [[float(s), c] for s, c in zip(steps, colors, strict=True)],
        "showscale": False,
        "text": [[f"{cell['gain']:.0%}" for cell in row] for row in rows],
        "texttemplate": "%{text}",
        "customdata": [[cell["hover"] for cell in row] for row in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "xgap": 2,
        "ygap": 2,
    }


def _legend(name: str, place: int) -> Trace:
    """A square in the legend."""
    marker = {"color": PALETTE[place % len(PALETTE)], "symbol": "square", "size": 12}
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "mode": "markers",
        "marker": marker,
        "name": safe_text(name),
        "showlegend": True,
    }
