"""Animated message trace of a collective schedule: messages, and the chunks on each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, seconds_text
from labkit.figures.kit.canvas import CLEAR, GRID, Figure, axis
from labkit.figures.kit.entries import INK
from labkit.figures.kit.frames import BARE, Points, animation, arrows, legend, table, words
from labkit.figures.kit.marks import cells, step_colors
from labkit.figures.kit.panels import Trace
from labkit.network import Network
from labkit.schedules import ALLREDUCE, IN_NETWORK, get_collective
from labkit.schedules.interpreter import (
    Holdings,
    chunk_name,
    execute,
    follow,
    message_size,
    span_name,
    sum_name,
)
from labkit.schedules.round import Integers, Round, Schedule
from labkit.simulate import simulate

ADDS, REPLACES = "#D55E00", "#0072B2"
# Each colour shows the state of a rank's value in a chunk. A value is absent, present, received in
# this round, or part of the full sum.
ABSENT, THERE, NEW, COMPLETE = GRID, "#0072B2", "#D55E00", "#009E73"
LEGEND = legend(
    [
        ("message that is added", ADDS, "solid"),
        ("message that replaces", REPLACES, "dash"),
        ("value of a rank", THERE, "square"),
        ("value received in this round", NEW, "square"),
        ("complete sum", COMPLETE, "square"),
    ]
)
CAPTION, CELL, LOWEST = (
    62,
    38,
    280,
)  # heights in pixels: caption, row of a rank, minimum of all rows together
# `CIRCLE` is the range of x for the circle of ranks. `BOXES` is the range of x for the chunk boxes.
# The whole width of the figure is the range 0 to 1.
CIRCLE, BOXES = [0.0, 0.35], [0.41, 1.0]
# In a round with more than `LABELLED` arrows, chunk names have no room. The arrows of such a round
# have no chunk names.
LABELLED = 20
EDGE = 0.08  # gap between a chunk's strip and the chunk's border, in chunk widths
ON_BOXES = {"xaxis": "x2", "yaxis": "y2"}


def frame(holdings: Holdings, number: int, texts: list[list[str]], caption: str) -> list[Trace]:
    """Return the animation frame after `number` rounds; `texts[rank][chunk]` labels the chunks."""
    sent = holdings.rounds[number - 1] if number else Round([], [], reduce=[])
    return [
        _arrows(sent.take(sent.reduce), holdings.names, "adds", ADDS, "solid"),
        _arrows(sent.take(~sent.reduce), holdings.names, "replaces", REPLACES, "dash"),
        _labels(sent, len(holdings.names), holdings.chunks),
        _strips(holdings, number),
        _words(holdings, number, texts),
        words([[0, 0]], [caption], 13, xaxis="x3", yaxis="y3", textposition="middle right"),
    ]


def rank_circle(names: Sequence[str]) -> Trace:
    """Return a circle with a name for each rank and switch."""
    circle = {"size": 26, "color": CLEAR, "line": {"color": INK, "width": 1.5}}
    return words(_place(len(names)), names, 13, mode="markers+text", marker=circle)


def frame_layout(names: Sequence[str], chunks: int) -> Trace:
    """Return a layout with axes of rank circle, buffers and caption, and the buffer outlines."""
    size = len(names)
    high = max(CELL * size, LOWEST)
    inner = CAPTION + high
    top = 1 - CAPTION / inner
    # The margin `below` centres the rows if the ranks are few.
    below = (high - CELL * size) / 2 / inner
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
    """Return the outline of a rank's buffer, and lines between its chunks."""
    on = {"xref": "x2", "yref": "y2", "layer": "below", "y0": rank + 0.08, "y1": rank + 0.92}
    frame: Trace = {"type": "rect", "x0": 0, "x1": chunks, "line": {"color": INK, "width": 1}}
    between: Trace = {"type": "line", "line": {"color": GRID, "width": 1}}
    lines = [between | {"x0": chunk, "x1": chunk} for chunk in range(1, chunks)]
    return [on | shape for shape in (frame, *lines)]


def _place(size: int) -> Points:
    """Return the positions of ranks on the circle, clockwise from the top; shape (size, 2)."""
    angle = 2 * np.pi * np.arange(size) / size
    return np.stack([np.sin(angle), np.cos(angle)], axis=1)


def _curve(start: Points, stop: Points) -> Points:
    """Return a curve between two ranks, bent to the right to separate the two directions."""
    direction = stop - start
    side = np.array([direction[1], -direction[0]])
    middle = (start + stop) / 2 + 0.14 * side
    # The curve is a quadratic Bézier curve.
    t = np.linspace(0, 1, 25)[:, None]
    points = (1 - t) ** 2 * start + 2 * t * (1 - t) * middle + t**2 * stop
    # Each arrow ends before the circles that represent ranks. The arrowhead therefore does not
    # cover the name of a rank.
    clear = np.minimum(np.hypot(*(points - start).T), np.hypot(*(points - stop).T)) > 0.15
    visible: Points = points[clear]
    return visible


def _arrows(sent: Round, names: Sequence[str], verb: str, color: str, dash: str) -> Trace:
    """Return one arrow for each message; `verb` says what the messages do to their chunks."""
    place = _place(len(names))
    paths = [_curve(place[source], place[destination]) for source, destination, *_ in sent.rows()]
    hover = [
        f"{names[source]} to {names[destination]}: chunk {span_name(chunk, span)} {verb}"
        for source, destination, chunk, span, _ in sent.rows()
    ]
    return arrows(paths, color, dash, hover)


def _labels(sent: Round, size: int, chunks: int) -> Trace:
    """Return the chunk names: each is beside its arrow, near the sender, where no arrows cross."""
    # With one chunk, each message carries the whole buffer, so the arrows need no names.
    rows = sent.rows() if chunks > 1 and len(sent) <= LABELLED else []
    place = _place(size)
    points, texts = [], []
    for source, destination, chunk, span, _ in rows:
        curve = _curve(place[source], place[destination])
        at = int(0.25 * len(curve))
        direction = curve[min(at + 1, len(curve) - 1)] - curve[at - 1]
        side = np.array([direction[1], -direction[0]]) / max(float(np.hypot(*direction)), 1e-9)
        points.append(curve[at] + 0.1 * side)
        texts.append(span_name(chunk, span))
    return words(np.array(points).reshape(-1, 2), texts, 13)


def _strip_edges(chunks: int, size: int) -> Points:
    """Return the left and right edges of the strip segments: one segment per chunk and rank."""
    width = (1 - 2 * EDGE) / size
    # `start` has one row per chunk, and one column per rank.
    start = np.arange(chunks)[:, None] + EDGE + width * np.arange(size)
    return np.stack([start, start + 0.86 * width], axis=2).ravel()


def _strips(holdings: Holdings, number: int) -> Trace:
    """Return a strip under each chunk: a segment per rank, coloured if its value is there."""
    held = holdings.held[number]
    nodes, chunks, size = held.shape
    kind = np.where(held > 0, 2, 1)
    kind = np.where((held == 1).all(axis=2, keepdims=True), 4, kind)
    # New values keep their own colour even in complete sums, so that new values are always visible.
    kind = np.where(holdings.new(number) > 0, 3, kind)
    # Rows and columns without values form the gaps of the heat map. Plotly's own gaps would all
    # have a single size.
    picture: Integers = np.zeros((2 * nodes - 1, 2 * chunks * size - 1), np.int64)
    picture[::2, ::2] = kind.reshape(nodes, chunks * size)
    return cells(
        picture.astype(np.int8),
        _strip_edges(chunks, size).round(4),
        np.stack([np.arange(nodes) + 0.64, np.arange(nodes) + 0.84], axis=1).ravel(),
        step_colors([CLEAR, ABSENT, THERE, NEW, COMPLETE]),
        most=4,
        on=ON_BOXES,
    )


def _words(holdings: Holdings, number: int, texts: Sequence[Sequence[str]]) -> Trace:
    """Return the contents of each chunk as text above its strip."""
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


MOST_RANKS = 12
SPOKEN = 40  # greatest number of messages that the alternative text lists one by one


def message_trace(
    algorithm: str | Schedule,
    size: int,
    network: str | Network | None = None,
    values: ArrayLike | None = None,
    nbytes: float = 2**20,
) -> Figure:
    """Animate a collective with one frame per round: messages, and the chunks on each rank.

    Rank 2 starts with the values a2, b2, … in its chunks a, b, …. The text a0+a2 in a chunk means
    the sum of the values of ranks 0 and 2. The text Σa means the sum over all ranks. A play button,
    a pause button and a slider select the round.

    Args:
        algorithm: Name of a collective in `labkit.schedules`, or a function. The function returns
            the rounds for a number of ranks.
        size: Number of ranks, 2 to 12.
        network: Network that defines the layout of hosts and links, and on which the rounds are
            simulated. By default, the figure shows no times.
        values: Initial values of the ranks, shape (size, chunks); default: names such as a2.
        nbytes: Size of the buffer in bytes for the simulation.

    Raises:
        InvalidInput: The size is out of range, or `values` does not have the shape (size, chunks).
    """
    if not 2 <= size <= MOST_RANKS:
        raise InvalidInput(
            f"size={size}: a message trace draws 2 to {MOST_RANKS} ranks; for more ranks use "
            f"counts_table or link_utilisation"
        )
    world = Network.parse(network)
    schedule = _schedule(algorithm, world)
    holdings = follow(schedule, size)
    name = algorithm if isinstance(algorithm, str) else getattr(algorithm, "__name__", "schedule")
    title = f"{_title(name).capitalize()}, {size} ranks"
    times = None
    if world is not None:
        times = _times(schedule, size, nbytes, world, len(holdings.rounds))
        title += f" · simulation · network {world} · n = {bytes_text(nbytes)}"
    texts = _texts(holdings, None if values is None else np.asarray(values))
    captions = _captions(holdings, times)
    states = [
        frame(holdings, number, texts[number], caption) for number, caption in enumerate(captions)
    ]
    return animation(
        fixed=[rank_circle(holdings.labels), *LEGEND],
        states=states,
        layout=frame_layout(holdings.names, holdings.chunks),
        title=title,
        alt=_in_words(title, holdings, captions),
        table=_as_table(holdings, texts),
        step="after round ",
        # The still picture shows the first round, because the initial state has no arrows.
        first_frame=min(1, len(states) - 1),
    )


def _title(name: str) -> str:
    """Return the name of the collective for titles, such as `ring allreduce`."""
    words = name.replace("_", " ")
    return f"{words} allreduce" if name in ALLREDUCE | IN_NETWORK else words


def _schedule(algorithm: str | Schedule, network: Network | None) -> Schedule:
    if not isinstance(algorithm, str):
        return algorithm
    return get_collective(algorithm) if network is None else network.schedule(algorithm)


def _times(
    schedule: Schedule, size: int, nbytes: float, network: Network, rounds: int
) -> list[tuple[float, float]]:
    """Return the times of the first departure and the last delivery in each round, in seconds."""
    trace = simulate(schedule, size, nbytes, network, trace=True).trace
    assert trace is not None  # The type checker cannot know that `trace=True` yields a trace.
    places = [trace.round == number for number in range(rounds)]
    return [(float(trace.start[at].min()), float(trace.delivery[at].max())) for at in places]


def _texts(holdings: Holdings, values: np.ndarray | None) -> list[list[list[str]]]:
    """Return the texts of the chunks, indexed by [round][rank][chunk]; round 0 is the start."""
    _, size, chunks, _ = holdings.held.shape
    if values is None:
        room = max(4, 76 // chunks)  # number of characters that fit in a drawn chunk
        return [
            [[sum_name(held[r, c], c, room) for c in range(chunks)] for r in range(size)]
            for held in holdings.held
        ]
    if values.shape != (size, chunks):
        raise InvalidInput(
            f"values have shape {values.shape}, but this schedule divides each buffer of {size} "
            f"ranks into {chunks} chunks; give values of shape {(size, chunks)}"
        )
    states = [values, *(after for _, after in execute(holdings.rounds, values))]
    return [[[f"{number:.4g}" for number in row] for row in state] for state in states]


def _captions(holdings: Holdings, times: list[tuple[float, float]] | None) -> list[str]:
    """Return a caption for the start and each round: number and size of messages, and times."""
    count = len(holdings.rounds)
    lines = ["start: every rank has only its own values"]
    for number, messages in enumerate(holdings.rounds, 1):
        plural = "message" if len(messages) == 1 else "messages"
        line = f"round {number} of {count}: {len(messages)} {plural} of "
        line += message_size(messages, holdings.chunks)
        if times is not None:
            first, last = times[number - 1]
            line += f"<br>{seconds_text(first)} to {seconds_text(last)} on the simulated clock"
        lines.append(line)
    return lines


def _in_words(title: str, holdings: Holdings, captions: Iterable[str]) -> str:
    """Return the alternative text of the figure, with rounds, messages and the final state."""
    rounds, total = len(holdings.rounds), holdings.messages
    details = [f"Animated message trace. {title}: {rounds} rounds, {total} messages"]
    for messages, caption in zip(holdings.rounds, list(captions)[1:], strict=True):
        line = caption.replace("<br>", ", ")
        details.append(f"{line}: {_messages(holdings, messages)}" if total <= SPOKEN else line)
    if holdings.complete:
        details.append("At the end, every rank holds the sum of every chunk")
    else:
        whole = int((holdings.held[-1] == 1).all(axis=2).sum())
        chunks = holdings.held[-1][..., 0].size
        details.append(f"At the end, {whole} of {chunks} chunks on the ranks hold the full sum")
    return ". ".join(details) + "."


def _messages(holdings: Holdings, messages: Round) -> str:
    """List the messages of a round: `0 to 1 adds d, 1 to 2 adds a`."""
    whole, names = holdings.chunks == 1, holdings.labels
    return ", ".join(
        f"{names[source]} to {names[destination]} {'adds' if reduce else 'replaces'}"
        + ("" if whole else f" {span_name(chunk, span)}")
        for source, destination, chunk, span, reduce in messages.rows()
    )


def _as_table(holdings: Holdings, texts: list[list[list[str]]]) -> str:
    sent = ["start", *(_messages(holdings, messages) for messages in holdings.rounds)]
    rows = [
        [str(number), details, *map("  ".join, state)]
        for number, (details, state) in enumerate(zip(sent, texts, strict=True))
    ]
    return table(["round", "messages", *holdings.names], rows)
