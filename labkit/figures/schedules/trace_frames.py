"""The frames of a message trace: ranks on a circle with arrows, and their chunks in boxes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.figures.kit.canvas import CLEAR, GRID, axis
from labkit.figures.kit.entries import INK
from labkit.figures.kit.frames import BARE, Points, arrows, legend, words
from labkit.figures.kit.marks import cells, in_steps
from labkit.figures.kit.sheet import Trace
from labkit.schedules.holdings import Holdings, chunk_name, span_name, sum_name
from labkit.schedules.round import Integers, Round

ADDS, REPLACES = "#D55E00", "#0072B2"
# Of a rank's value in a chunk: not there, there, came in this round, there with all others.
ABSENT, THERE, NEW, COMPLETE = GRID, "#0072B2", "#D55E00", "#009E73"
LEGEND = legend(
    [
        ("adds", ADDS, "solid"),
        ("replaces", REPLACES, "dash"),
        ("a rank's value is in the chunk", THERE, "square"),
        ("came in this round", NEW, "square"),
        ("with all others: the sum", COMPLETE, "square"),
    ]
)
CAPTION, CELL, LOWEST = 62, 38, 280  # pixels: of the line above, of a rank, of all ranks at least
CIRCLE, BOXES = [0.0, 0.35], [0.41, 1.0]  # where the two parts stand, of the width
LABELLED = 20  # so many arrows have room for the names of their chunks
EDGE = 0.08  # between a chunk's strip and its border
ON_BOXES = {"xaxis": "x2", "yaxis": "y2"}


def state(holdings: Holdings, number: int, texts: list[list[str]], caption: str) -> list[Trace]:
    """The traces after so many rounds; texts: what stands in the chunks, [rank][chunk]."""
    sent = holdings.rounds[number - 1] if number else Round([], [], reduce=[])
    return [
        _arrows(sent.take(sent.reduce), holdings.names, "adds", ADDS, "solid"),
        _arrows(sent.take(~sent.reduce), holdings.names, "replaces", REPLACES, "dash"),
        _labels(sent, len(holdings.names), holdings.chunks),
        _strips(holdings, number),
        _words(holdings, number, texts),
        words([[0, 0]], [caption], 13, xaxis="x3", yaxis="y3", textposition="middle right"),
    ]


def ranks(names: Sequence[str]) -> Trace:
    """The circle of ranks and switches."""
    circle = {"size": 26, "color": CLEAR, "line": {"color": INK, "width": 1.5}}
    return words(_place(len(names)), names, 13, mode="markers+text", marker=circle)


def layout(names: Sequence[str], chunks: int) -> Trace:
    """Axes of the circle, of the boxes and of the line above them, with the boxes' frames."""
    size = len(names)
    high = max(CELL * size, LOWEST)
    inner = CAPTION + high
    top = 1 - CAPTION / inner
    below = (high - CELL * size) / 2 / inner  # few ranks: boxes in the middle
    circle = BARE | {"range": [-1.3, 1.3]}
    boxes = {"showgrid": False, "fixedrange": True, "showline": False, "ticklen": 0}
    chunk_axis = axis("", **boxes, side="top", domain=BOXES, anchor="y2", range=[0, chunks])
    chunk_axis["tickvals"] = [chunk + 0.5 for chunk in range(chunks)]
    chunk_axis["ticktext"] = ["chunk a", *(chunk_name(chunk) for chunk in range(1, chunks))]
    rank_axis = axis("", **boxes, domain=[below, top - below], anchor="x2", range=[size, 0])
    rank_axis["tickvals"] = [rank + 0.5 for rank in range(size)]
    rank_axis["ticktext"] = [f"{name} " for name in names]
    square = {"domain": [0, top], "anchor": "x", "scaleanchor": "x", "constrain": "domain"}
    return {
        "height": inner,
        "xaxis": circle | {"domain": CIRCLE, "anchor": "y"},
        "yaxis": circle | square,
        "xaxis2": chunk_axis,
        "yaxis2": rank_axis,
        "xaxis3": BARE | {"domain": BOXES, "anchor": "y3", "range": [0, 1]},
        "yaxis3": BARE | {"domain": [1 - 40 / inner, 1], "anchor": "x3", "range": [-1, 1]},
        "shapes": [box for rank in range(size) for box in _boxes(rank, chunks)],
    }


def _boxes(rank: int, chunks: int) -> list[Trace]:
    """A frame around a rank's buffer, and a line between its chunks."""
    on = {"xref": "x2", "yref": "y2", "layer": "below", "y0": rank + 0.08, "y1": rank + 0.92}
    frame: Trace = {"type": "rect", "x0": 0, "x1": chunks, "line": {"color": INK, "width": 1}}
    between: Trace = {"type": "line", "line": {"color": GRID, "width": 1}}
    lines = [between | {"x0": chunk, "x1": chunk} for chunk in range(1, chunks)]
    return [on | shape for shape in (frame, *lines)]


def _place(size: int) -> Points:
    """Ranks around the circle, rank 0 above, clockwise; shape (size, 2)."""
    angle = 2 * np.pi * np.arange(size) / size
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)


def _curve(start: Points, stop: Points) -> Points:
    """A curve between two ranks, bent to the right so that both directions show."""
    way = stop - start
    side = np.array([way[1], -way[0]])
    middle = (start + stop) / 2 + 0.14 * side
    # A quadratic Bézier curve.
    t = np.linspace(0, 1, 25)[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * stop
    # Not under the circles of the two ranks.
    clear = np.minimum(np.hypot(*(points - start).T), np.hypot(*(points - stop).T)) > 0.15
    seen: Points = points[clear]
    return seen


def _arrows(sent: Round, names: Sequence[str], verb: str, color: str, dash: str) -> Trace:
    """All messages of one kind."""
    place = _place(len(names))
    paths = [_curve(place[source], place[destination]) for source, destination, *_ in sent.rows()]
    hover = [
        f"{names[source]} to {names[destination]}: chunk {span_name(chunk, span)} {verb}"
        for source, destination, chunk, span, _ in sent.rows()
    ]
    return arrows(paths, color, dash, hover)


def _labels(sent: Round, size: int, chunks: int) -> Trace:
    """The chunk beside each arrow, nearer to its source: arrows cross in the middle."""
    # One chunk is the whole buffer, of which nothing need be said.
    rows = sent.rows() if chunks > 1 and len(sent) <= LABELLED else []
    place = _place(size)
    points, texts = [], []
    for source, destination, chunk, span, _ in rows:
        curve = _curve(place[source], place[destination])
        at = int(0.25 * len(curve))
        way = curve[min(at + 1, len(curve) - 1)] - curve[at - 1]
        side = np.array([way[1], -way[0]]) / max(float(np.hypot(*way)), 1e-9)
        points.append(curve[at] + 0.1 * side)
        texts.append(span_name(chunk, span))
    return words(np.array(points).reshape(-1, 2), texts, 13)


def _strip_edges(chunks: int, size: int) -> Points:
    """Edges of the segments of all strips: a segment a rank, and gaps between them."""
    width = (1 - 2 * EDGE) / size
    start = np.arange(chunks)[:, None] + EDGE + width * np.arange(size)  # (chunks, size)
    return np.stack([start, start + 0.86 * width], axis=2).ravel()


def _strips(holdings: Holdings, number: int) -> Trace:
    """A strip under each chunk, with a segment a rank: it shows whose values are in it."""
    held = holdings.held[number]
    nodes, chunks, size = held.shape
    kind = np.where(held > 0, 2, 1)
    kind = np.where((held == 1).all(axis=2, keepdims=True), 4, kind)
    # Last, so that what has just come is seen even in a sum that is now complete.
    kind = np.where(holdings.new(number) > 0, 3, kind)
    # Every other row and column is a gap: a heat map has no room of unequal size between cells.
    picture: Integers = np.zeros((2 * nodes - 1, 2 * chunks * size - 1), np.int64)
    picture[::2, ::2] = kind.reshape(nodes, chunks * size)
    return cells(
        picture.astype(np.int8),
        _strip_edges(chunks, size).round(4),
        np.stack([np.arange(nodes) + 0.64, np.arange(nodes) + 0.84], axis=1).ravel(),
        in_steps([CLEAR, ABSENT, THERE, NEW, COMPLETE]),
        most=4,
        on=ON_BOXES,
    )


def _words(holdings: Holdings, number: int, texts: Sequence[Sequence[str]]) -> Trace:
    """What stands in each chunk, above its strip."""
    held = holdings.held[number]
    nodes, chunks, size = held.shape
    column, row = np.meshgrid(np.arange(chunks), np.arange(nodes))
    hover = [
        f"{name}, chunk {chunk_name(chunk)}: {sum_name(held[node, chunk], chunk)}<br>"
        f"values of {np.count_nonzero(held[node, chunk])} of {size} ranks"
        for node, name in enumerate(holdings.names)
        for chunk in range(chunks)
    ]
    return words(
        np.stack([column.ravel() + 0.5, row.ravel() + 0.36], axis=1),
        [text for line in texts for text in line],
        12 if chunks <= 4 else 11 if chunks <= 8 else 10,
        hovertext=hover,
        hoverinfo="text",
        **ON_BOXES,
    )
