"""The frames of a ready queue: a graph whose counts fall to zero, above the length of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from labkit.figures.graphs.layered import Edge, Layout, Node
from labkit.figures.kit.canvas import axis
from labkit.figures.kit.entries import INK, safe_text
from labkit.figures.kit.frames import BARE, legend, words
from labkit.figures.kit.sheet import Trace
from labkit.records.ready_queue import Moment


class State(NamedTuple):
    """How an operation is drawn: told apart by its symbol, without colour, too."""

    name: str
    color: str
    symbol: str


WAITING = State("waits: number of dependencies that have not ended", "#56B4E9", "circle-open")
QUEUED = State("in the ready queue", "#E69F00", "square")
RUNNING = State("runs", "#D55E00", "diamond")
DONE = State("has ended", "#009E73", "circle")
STATES = (WAITING, QUEUED, RUNNING, DONE)
LEGEND = legend([(each.name, each.color, "square") for each in STATES])
CAPTION, LAYER, QUEUE, BETWEEN = 56, 38, 110, 50  # pixels: line above, a layer, the length, axes
TIME, LENGTH = "x2", "y2"  # axes of the queue's length


def fixed(
    nodes: Sequence[Node], places: Layout, times: Sequence[float], lengths: Sequence[int]
) -> list[Trace]:
    """The traces of all frames: edges, types, and the length of the queue over time (ms)."""
    at = [places.nodes[node.name] for node in nodes]
    types = words(
        # Beside the node, not under the counts.
        np.array([[place.across + 0.16, place.layer] for place in at]),
        [safe_text(node.kind) for node in nodes],
        10,
        textposition="middle right",
    )
    length: Trace = {
        "type": "scatter",
        "x": np.array(times, np.float32),
        "y": lengths,
        "mode": "lines",
        "line": {"color": QUEUED.color, "width": 2, "shape": "hv"},
        "xaxis": TIME,
        "yaxis": LENGTH,
        "hovertemplate": "%{x:.3f} ms: %{y} in the queue<extra></extra>",
        "showlegend": False,
    }
    return [_edges(places, False), _edges(places, True), types, length, *LEGEND]


def state(
    nodes: Sequence[Node], places: Layout, moment: Moment, caption: str, length: int
) -> list[Trace]:
    """The traces of one moment: nodes by their state, where it is in time, and the line above."""
    states = [state_of(node.name, moment) for node in nodes]
    at = [places.nodes[node.name] for node in nodes]
    counts = [moment.unresolved[node.name] for node in nodes]
    drawn: Trace = {
        "type": "scatter",
        "x": np.array([place.across for place in at], np.float32).round(3),
        "y": [place.layer for place in at],
        "mode": "markers+text",
        "marker": {
            "color": [each.color for each in states],
            "symbol": [each.symbol for each in states],
            "size": 16,
            "line": {"width": 2, "color": [each.color for each in states]},
        },
        "text": [
            str(count) if each is WAITING else ""
            for each, count in zip(states, counts, strict=True)
        ],
        "textfont": {"size": 10, "color": INK},
        "hovertext": [safe_text(f"{n.name}: {s.name}") for n, s in zip(nodes, states, strict=True)],
        "hoverinfo": "text",
        "showlegend": False,
    }
    here: Trace = {
        "type": "scatter",
        "x": [1e3 * moment.time],
        "y": [length],
        "mode": "markers",
        "marker": {"color": RUNNING.color, "size": 11},
        "xaxis": TIME,
        "yaxis": LENGTH,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    above = words([[0, 0]], [caption], 13, xaxis="x3", yaxis="y3", textposition="middle right")
    return [drawn, here, above]


def state_of(name: str, moment: Moment) -> State:
    """What an operation is at at a moment."""
    if name in moment.running:
        return RUNNING
    if name in moment.queued:
        return QUEUED
    return DONE if name in moment.done else WAITING


def layout(places: Layout, most: int) -> Trace:
    """Axes: the line above, the graph, and the queue below, which holds `most` at most."""
    layers = [place.layer for place in places.nodes.values()]
    ends = [place.across for place in places.nodes.values()]
    high = LAYER * (max(layers) + 2)
    inner = CAPTION + high + BETWEEN + QUEUE + BETWEEN
    graph = [(QUEUE + 2 * BETWEEN) / inner, 1 - CAPTION / inner]
    time = axis("time, ms", fixedrange=True, anchor=LENGTH)
    length = axis("in the queue", fixedrange=True, anchor=TIME, range=[-0.3, most + 0.7])
    wide = [min(ends) - 0.5, max(ends) + 1.2]
    return {
        "height": inner,
        "margin": {"t": 40, "b": 150, "l": 56, "r": 16, "pad": 0},
        "xaxis": BARE | {"anchor": "y", "range": wide},
        "yaxis": BARE | {"anchor": "x", "domain": graph, "range": [max(layers) + 0.7, -0.7]},
        "xaxis2": time,
        "yaxis2": length | {"domain": [BETWEEN / inner, (BETWEEN + QUEUE) / inner], "nticks": 4},
        "xaxis3": BARE | {"anchor": "y3", "range": [0, 1]},
        "yaxis3": BARE | {"anchor": "x3", "domain": [1 - 40 / inner, 1], "range": [-1, 1]},
    }


def _edges(places: Layout, control: bool) -> Trace:
    """All edges of one kind; dotted where nothing is read."""
    met = [_path(edge, path) for edge, path in places.edges.items() if edge.control == control]
    # Plotly breaks a line at what is not a number.
    gap = np.full((1, 2), np.nan)
    points = np.concatenate([gap[:0], *(part for path in met for part in (path, gap))])
    return {
        "type": "scatter",
        "x": points[:, 0].astype(np.float32),
        "y": points[:, 1].astype(np.float32),
        "mode": "lines",
        "line": {
            "color": INK,
            "width": 1 if control else 0.6,
            "dash": "dot" if control else "solid",
        },
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _path(edge: Edge, path: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.array([(across, layer) for layer, across in path], float)
