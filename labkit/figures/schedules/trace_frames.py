"""The frames of a message trace: ranks on a circle with arrows, and their chunks in boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from labkit.figures.kit.canvas import CLEAR, GRID, HEAD, LEFT, RIGHT, Figure, axis, base_layout
from labkit.figures.kit.entries import INK
from labkit.figures.schedules.animation import Animation, buttons, slider, text_trace
from labkit.figures.schedules.holdings import Holdings, chunk_name, span_name, sum_name
from labkit.schedules.round import Integers, Round

Points = NDArray[np.float64]

ADDS, REPLACES = "#D55E00", "#0072B2"
# Of a rank's value in a chunk: not there, there, came in this round, there with all others.
ABSENT, THERE, NEW, COMPLETE = GRID, "#0072B2", "#D55E00", "#009E73"
CAPTION, CELL, CONTROLS, LEGEND = 62, 38, 74, 34  # pixels
CIRCLE, BOXES = [0.0, 0.35], [0.41, 1.0]  # where the two parts stand, of the width
LABELLED = 20  # so many arrows have room for the names of their chunks
EDGE = 0.08  # between a chunk's strip and its border


def animation(
    holdings: Holdings,
    texts: list[list[list[str]]],
    captions: list[str],
    title: str,
    alt: str,
    table: str,
) -> Figure:
    """All states of a schedule; the figure shows the first round until it is played.

    texts: what stands in the chunks, [state][rank][chunk]; captions: a line a state; alt: the
    figure in words; table: its frames as HTML.
    """
    size, chunks = holdings.held.shape[1:3]
    states = [
        _state(holdings, number, texts[number], caption) for number, caption in enumerate(captions)
    ]
    shown = min(1, len(states) - 1)
    fixed = [_ranks(size), *_legend()]
    places = list(range(len(fixed), len(fixed) + len(states[0])))
    frames = [
        go.Frame(name=str(number), data=state, traces=places) for number, state in enumerate(states)
    ]
    figure = Animation(data=[*fixed, *states[shown]], frames=frames)
    figure.update_layout(_layout(size, chunks, title, alt))
    controls = slider(len(states), shown, "after round ")
    figure.update_layout(sliders=[controls], updatemenus=[buttons()])
    figure.layout.meta = {"alt": alt, "table": table, "controls": CONTROLS}
    return figure


def _state(
    holdings: Holdings, number: int, texts: list[list[str]], caption: str
) -> list[dict[str, Any]]:
    """The traces that change from frame to frame."""
    sent = holdings.rounds[number - 1] if number else Round([], [], reduce=[])
    size = holdings.held.shape[1]
    return [
        _arrows(sent.take(sent.reduce), size, "adds", ADDS, "solid"),
        _arrows(sent.take(~sent.reduce), size, "replaces", REPLACES, "dash"),
        _labels(sent, size, holdings.chunks),
        _strips(holdings, number),
        _words(holdings, number, texts),
        _caption(caption),
    ]


def _place(size: int) -> Points:
    """Ranks around the circle, rank 0 above, clockwise; shape (size, 2)."""
    angle = 2 * np.pi * np.arange(size) / size
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)


def _curve(start: Points, stop: Points) -> Points:
    """From near one rank to near another, bent to the right so that both directions show."""
    way = stop - start
    side = np.array([way[1], -way[0]])
    middle = (start + stop) / 2 + 0.14 * side
    t = np.linspace(0, 1, 25)[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * stop
    clear = np.minimum(np.hypot(*(points - start).T), np.hypot(*(points - stop).T)) > 0.15
    seen: Points = points[clear]
    return seen


def _arrows(sent: Round, size: int, name: str, color: str, dash: str) -> dict[str, Any]:
    """All messages of one kind as one trace: curves with a gap between them, a head at each end."""
    place = _place(size)
    x: list[float | None] = []
    y: list[float | None] = []
    heads: list[int] = []
    hover: list[str] = []
    for source, destination, chunk, span, _ in sent.rows():
        curve = _curve(place[source], place[destination])
        x += [*curve[:, 0].round(3).tolist(), None]
        y += [*curve[:, 1].round(3).tolist(), None]
        heads += [0] * (len(curve) - 1) + [13, 0]
        words = f"rank {source} to rank {destination}: chunk {span_name(chunk, span)} {name}"
        hover += [words] * (len(curve) + 1)
    return {
        "type": "scatter",
        "x": x,
        "y": y,
        "mode": "lines+markers",
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {
            "symbol": "arrow",
            "angleref": "previous",
            "size": heads,
            "color": color,
            "opacity": 1,
            "line": {"width": 0},
        },
        "hovertext": hover,
        "hoverinfo": "text",
        "showlegend": False,
    }


def _labels(sent: Round, size: int, chunks: int) -> dict[str, Any]:
    """The chunk beside each arrow, nearer to its source: arrows cross in the middle."""
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
    x, y = np.array(points).reshape(-1, 2).T.round(3).tolist()
    return text_trace(x, y, texts, 13, hoverinfo="skip")


def _ranks(size: int) -> dict[str, Any]:
    x, y = _place(size).T.round(3).tolist()
    return {
        **text_trace(x, y, [str(rank) for rank in range(size)], 13, hoverinfo="skip"),
        "mode": "markers+text",
        "marker": {"size": 26, "color": CLEAR, "line": {"color": INK, "width": 1.5}},
    }


def _strip_edges(chunks: int, size: int) -> Points:
    """Edges of the segments of all strips: a segment a rank, and gaps between them."""
    width = (1 - 2 * EDGE) / size
    start = np.arange(chunks)[:, None] + EDGE + width * np.arange(size)  # (chunks, size)
    return np.stack([start, start + 0.86 * width], axis=2).ravel()


def _strips(holdings: Holdings, number: int) -> dict[str, Any]:
    """Under each chunk a strip with a segment a rank: whose values are in it."""
    held = holdings.held[number]
    size, chunks, _ = held.shape
    kind = np.where(held > 0, 2, 1)
    kind = np.where((held == 1).all(axis=2, keepdims=True), 4, kind)
    kind = np.where(holdings.new(number) > 0, 3, kind)
    picture: Integers = np.zeros((2 * size - 1, 2 * chunks * size - 1), np.int64)
    picture[::2, ::2] = kind.reshape(size, chunks * size)
    y = np.stack([np.arange(size) + 0.64, np.arange(size) + 0.84], axis=1).ravel()
    colors = [CLEAR, ABSENT, THERE, NEW, COMPLETE]
    steps = [edge for step, color in enumerate(colors) for edge in _step(step, color, len(colors))]
    return {
        "type": "heatmap",
        "x": _strip_edges(chunks, size).round(4),
        "y": y,
        "z": picture.astype(np.int8),
        "zmin": 0,
        "zmax": len(colors) - 1,
        "colorscale": steps,
        "showscale": False,
        "hoverinfo": "skip",
        "xaxis": "x2",
        "yaxis": "y2",
    }


def _step(step: int, color: str, count: int) -> list[tuple[float, str]]:
    """A colour from half a step below to half a step above its number."""
    edges = ((step + side) / (count - 1) for side in (-0.5, 0.5))
    return [(min(max(edge, 0.0), 1.0), color) for edge in edges]


def _words(holdings: Holdings, number: int, texts: list[list[str]]) -> dict[str, Any]:
    """What stands in each chunk, above its strip."""
    held = holdings.held[number]
    size, chunks, _ = held.shape
    row, column = np.mgrid[:size, :chunks]
    hover = [
        f"rank {rank}, chunk {chunk_name(chunk)}: {sum_name(held[rank, chunk], chunk)}<br>"
        f"values of {np.count_nonzero(held[rank, chunk])} of {size} ranks"
        for rank in range(size)
        for chunk in range(chunks)
    ]
    return text_trace(
        (column + 0.5).ravel().tolist(),
        (row + 0.36).ravel().tolist(),
        [text for line in texts for text in line],
        12 if chunks <= 4 else 11 if chunks <= 8 else 10,
        hovertext=hover,
        hoverinfo="text",
        xaxis="x2",
        yaxis="y2",
    )


def _caption(text: str) -> dict[str, Any]:
    """The line above the boxes: a trace, for frames of traces need no new layout."""
    return text_trace([0], [0], [text], 13, hoverinfo="skip", xaxis="x3", yaxis="y3") | {
        "textposition": "middle right"
    }


def _legend() -> list[dict[str, Any]]:
    """Draw nothing but the legend."""
    nothing = {"type": "scatter", "x": [None], "y": [None], "hoverinfo": "skip"}
    arrows = [
        {"name": name, "mode": "lines", "line": {"color": color, "dash": dash, "width": 2}}
        for name, color, dash in (("adds", ADDS, "solid"), ("replaces", REPLACES, "dash"))
    ]
    segments = [
        {"name": name, "mode": "markers", "marker": {"color": color, "symbol": "square", "size": 9}}
        for name, color in (
            ("a rank's value is in the chunk", THERE),
            ("came in this round", NEW),
            ("with all others: the sum", COMPLETE),
        )
    ]
    return [nothing | each for each in [*arrows, *segments]]


def _layout(size: int, chunks: int, title: str, alt: str) -> dict[str, Any]:
    inner = CAPTION + max(CELL * size, 280)
    top = 1 - CAPTION / inner
    below = (max(CELL * size, 280) - CELL * size) / 2 / inner  # few ranks: boxes in the middle
    bare: dict[str, Any] = {"visible": False, "fixedrange": True}
    circle = bare | {"range": [-1.3, 1.3]}
    boxes = {"showgrid": False, "fixedrange": True, "showline": False, "ticklen": 0}
    names = {"tickvals": [c + 0.5 for c in range(chunks)], "side": "top"}
    ranks = {"tickvals": [r + 0.5 for r in range(size)], "range": [size, 0]}
    chunk_axis = axis("", **boxes, **names, domain=BOXES, anchor="y2", range=[0, chunks])
    chunk_axis["ticktext"] = [
        f"chunk {chunk_name(0)}" if not c else chunk_name(c) for c in range(chunks)
    ]
    rank_axis = axis("", **boxes, **ranks, domain=[below, top - below], anchor="x2")
    rank_axis["ticktext"] = [f"rank {rank} " for rank in range(size)]
    margin = {"t": HEAD, "b": LEGEND + CONTROLS, "l": LEFT // 3, "r": RIGHT, "pad": 0}
    return base_layout(title, "", alt) | {
        "height": HEAD + inner + LEGEND + CONTROLS,
        "margin": margin,
        "xaxis": circle | {"domain": CIRCLE, "anchor": "y"},
        "yaxis": circle
        | {"domain": [0, top], "anchor": "x", "scaleanchor": "x", "constrain": "domain"},
        "xaxis2": chunk_axis,
        "yaxis2": rank_axis,
        "xaxis3": bare | {"domain": BOXES, "anchor": "y3", "range": [0, 1]},
        "yaxis3": bare | {"domain": [1 - 40 / inner, 1], "anchor": "x3", "range": [-1, 1]},
        "shapes": _boxes(size, chunks),
        "dragmode": False,
    }


def _boxes(size: int, chunks: int) -> list[dict[str, Any]]:
    """A frame around each rank's buffer, and a line between its chunks."""
    on = {"xref": "x2", "yref": "y2", "layer": "below"}
    frames = [
        on | {"type": "rect", "x0": 0, "x1": chunks, "y0": rank + 0.08, "y1": rank + 0.92}
        for rank in range(size)
    ]
    between = [
        on | {"type": "line", "x0": c, "x1": c, "y0": rank + 0.08, "y1": rank + 0.92}
        for rank in range(size)
        for c in range(1, chunks)
    ]
    return [frame | {"line": {"color": INK, "width": 1}} for frame in frames] + [
        line | {"line": {"color": GRID, "width": 1}} for line in between
    ]
