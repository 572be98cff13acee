"""Who is fastest over bandwidth, latency and workers, and by how much: a map with a slider."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from labkit.common.errors import InvalidInput
from labkit.common.nearest import listed
from labkit.common.units import bits_text, seconds_text
from labkit.figures.kit.entries import PALETTE, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.panels import Trace
from labkit.forecast.study import Place

if TYPE_CHECKING:
    import pandas as pd

    from labkit.figures.kit.frames import Animation

GAIN = 0.05  # of the time of the way that is held against: less is no gain
APART = "not told apart"
UNSURE = "#BBBBBB"  # the colour of places where that is so
BANDS = (
    "A time is that of the median of seeds, its band from the seed of fewest steps to that of "
    "most; a way is fastest where its slowest seed is ahead of the quickest of all others"
)
CELL, AXIS = 34, 56  # pixels of a row, and of the axis above


def winners_table(places: Iterable[Place], usual: str) -> pd.DataFrame:
    """A row a place: latency, workers, bandwidth, who is fastest, and its gain over the usual way.

    `gain` is the share of the usual way's time that is saved; where it is below 5 %, the usual way
    counts as the winner. Where times have bands, a winner is surely faster: its band ends before
    all others begin, and another way than the usual one saves so much, too; else nobody is told
    apart.

    Raises: InvalidInput, where the usual way is not among those of the map.
    """
    import pandas as pd

    rows = []
    for place in places:
        if usual not in place.seconds:
            raise InvalidInput(f"usual={usual!r} is not on this map{listed(usual, place.seconds)}")
        winner, gain = _winner(place, usual)
        told = ", ".join(_time(place, name) for name in place.seconds)
        where = f"{place.workers:,} workers, {bits_text(place.bandwidth)}"
        where += f", {seconds_text(place.latency)}" + f": {APART}" * (winner == APART)
        rows.append(
            {"latency": place.latency, "workers": place.workers, "bandwidth": place.bandwidth}
            | {"winner": winner, "gain": gain, "hover": safe_text(f"{where}: {told}")}
        )
    return pd.DataFrame(rows)


def winners_map(places: Sequence[Place], usual: str, of: str, where: str = "") -> Animation:
    """Cells in the colour of who is fastest, with the share of time that it saves.

    Bandwidth runs to the right, workers upwards, latency by the slider. A way that saves less than
    5 % of the usual one's time does not count as faster, nor one whose band of seeds reaches into
    another's.

    Args:
        places: of `Study.map`.
        usual: the way that others are held against.
        of: what is trained, in words.
        where: what else is to be known of the machines.
    """
    from labkit.figures.kit.canvas import HEAD
    from labkit.figures.kit.frames import CONTROLS, LEGEND, played

    names, banded = list(places[0].seconds), places[0].bands is not None
    looks = {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}
    looks |= {APART: UNSURE} if banded else {}
    table = winners_table(places, usual)
    latencies = list(dict.fromkeys(table["latency"]))
    bandwidths, workers = (list(dict.fromkeys(table[c])) for c in ("bandwidth", "workers"))
    states = [
        [_cells(table[table["latency"] == latency], looks, bandwidths, workers)]
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
    legend = [_legend(name, color) for name, color in looks.items()]
    title = f"Who is fastest · forecast · {of}"
    found = winners_findings(places, usual)
    alt = ". ".join([title, where, *[BANDS] * banded, *(each.sentence for each in found)])
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
    table, banded = winners_table(places, usual), places[0].bands is not None
    gains = table[~table["winner"].isin([usual, APART])]
    head = f"nother way than **{usual}** saves at least {GAIN:.0%} of the time in"
    head = f"To the target, whatever the seed, a{head}" if banded else f"A{head}"
    found = [Finding(head, said=(f"{len(gains)} of {len(table)} places",))]
    if banded:
        unsure = int((table["winner"] == APART).sum())
        head = f"To the target, ways are {APART}, as bands of seeds overlap or little is saved, in"
        found.append(Finding(head, said=(f"{unsure} of {len(table)} places",)))
    for name, own in gains.groupby("winner", sort=False):
        top = own.loc[own["gain"].idxmax()]
        most = f"{top['workers']:,} workers, {bits_text(top['bandwidth'])}, "
        said = f"most at {most}{seconds_text(top['latency'])}: {top['gain']:.0%}"
        found.append(Finding(f"**{name}** is fastest in", said=(f"{len(own)} of them", said)))
    return found


def _winner(place: Place, usual: str) -> tuple[str, float]:
    """Who is fastest in a place, and its gain."""
    best = min(place.seconds, key=lambda name: place.seconds[name])
    gain = 1 - place.seconds[best] / place.seconds[usual]
    if place.bands is None:
        return best if gain >= GAIN else usual, gain
    quickest = min((low for n, (low, _) in place.bands.items() if n != best), default=np.inf)
    sure = place.bands[best][1] < quickest and (best == usual or gain >= GAIN)
    return (best, gain) if sure else (APART, 0.0)


def _time(place: Place, name: str) -> str:
    """What one takes there, with its band."""
    said = f"{name} {seconds_text(place.seconds[name])}"
    if place.bands is None:
        return said
    low, high = place.bands[name]
    band = f"{seconds_text(low)} to {seconds_text(high)}" if high < np.inf else "one seed, no band"
    return f"{said} ({band})"


def _cells(
    own: pd.DataFrame, looks: Mapping[str, str], bandwidths: list[float], workers: list[int]
) -> Trace:
    """One frame: a cell a place."""
    by: Mapping[tuple[int, float], Mapping[str, object]] = {
        (row["workers"], row["bandwidth"]): row for row in own.to_dict("records")
    }
    rows = [[by[count, each] for each in bandwidths] for count in workers]
    names, count = list(looks), len(looks)
    steps = np.repeat(np.arange(count + 1) / count, 2)[1:-1]
    colors = [color for color in looks.values() for _ in range(2)]
    return {
        "type": "heatmap",
        "x": [bits_text(each) for each in bandwidths],
        "y": [f"{each:,}" for each in workers],
        "z": [[names.index(str(cell["winner"])) for cell in row] for row in rows],
        "zmin": -0.5,
        "zmax": count - 0.5,
        "colorscale": [[float(s), c] for s, c in zip(steps, colors, strict=True)],
        "showscale": False,
        "text": [
            ["≈" if cell["winner"] == APART else f"{cell['gain']:.0%}" for cell in row]
            for row in rows
        ],
        "texttemplate": "%{text}",
        "customdata": [[cell["hover"] for cell in row] for row in rows],
        "hovertemplate": "%{customdata}<extra></extra>",
        "xgap": 2,
        "ygap": 2,
    }


def _legend(name: str, color: str) -> Trace:
    """A square in the legend."""
    marker = {"color": color, "symbol": "square", "size": 12}
    return {
        "type": "scatter",
        "x": [None],
        "y": [None],
        "mode": "markers",
        "marker": marker,
        "name": safe_text(name),
        "showlegend": True,
    }
