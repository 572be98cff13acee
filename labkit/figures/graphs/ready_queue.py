"""Ready queue of TensorFlow's executor in a traced step: animation, table, and summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import plural, seconds_text
from labkit.figures.graphs.layered import MOST, DrawnNode, Edge, GraphLayout, layout
from labkit.figures.graphs.step import CLOCK, nodes_of, short
from labkit.figures.kit.canvas import Figure, axis
from labkit.figures.kit.entries import INK, Finding, Markdown, safe_text, sentences
from labkit.figures.kit.frames import BARE, animation, legend, table, words
from labkit.figures.kit.panels import Trace
from labkit.records.step_graph import RESOLUTION, Moment, ReadyQueue, StepGraph, ready_queue


class OperationStyle(NamedTuple):
    """Name, colour and symbol of an operation's state; each state has a different symbol."""

    name: str
    color: str
    symbol: str


WAITING = OperationStyle("waiting (number: unfinished dependencies)", "#56B4E9", "circle-open")
QUEUED = OperationStyle("in the ready queue", "#E69F00", "square")
RUNNING = OperationStyle("running", "#D55E00", "diamond")
DONE = OperationStyle("finished", "#009E73", "circle")
STATES = (WAITING, QUEUED, RUNNING, DONE)
LEGEND = legend([(state.name, state.color, "square") for state in STATES])
# `CAPTION`, `LAYER`, `QUEUE` and `BETWEEN` are heights in pixels. The heights belong to the
# caption, a graph layer, the queue-length curve, and a gap.
CAPTION, LAYER, QUEUE, BETWEEN = 56, 38, 110, 50
# `TIME` and `LENGTH` are Plotly's names of the axes for time and queue length.
TIME, LENGTH = "x2", "y2"


def fixed_traces(
    nodes: Sequence[DrawnNode], places: GraphLayout, times: Sequence[float], lengths: Sequence[int]
) -> list[Trace]:
    """Return Plotly traces that all frames share: edges, operation types, and queue length."""
    node_places = [places.nodes[node.name] for node in nodes]
    types = words(
        # The operation type is drawn beside the node, because the node itself shows the dependency
        # count.
        np.array([[place.across + 0.16, place.layer] for place in node_places]),
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


def frame(
    nodes: Sequence[DrawnNode], places: GraphLayout, moment: Moment, caption: str, length: int
) -> list[Trace]:
    """Return the traces of one frame: nodes by state, a marker of the time, and the caption."""
    states = [state_of(node.name, moment) for node in nodes]
    node_places = [places.nodes[node.name] for node in nodes]
    counts = [moment.unresolved[node.name] for node in nodes]
    drawn: Trace = {
        "type": "scatter",
        "x": np.array([place.across for place in node_places], np.float32).round(3),
        "y": [place.layer for place in node_places],
        "mode": "markers+text",
        "marker": {
            "color": [state.color for state in states],
            "symbol": [state.symbol for state in states],
            "size": 16,
            "line": {"width": 2, "color": [state.color for state in states]},
        },
        "text": [
            str(count) if state is WAITING else ""
            for state, count in zip(states, counts, strict=True)
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


def state_of(name: str, moment: Moment) -> OperationStyle:
    """Return the state of an operation at a moment: waiting, queued, running or done."""
    if name in moment.running:
        return RUNNING
    if name in moment.queued:
        return QUEUED
    return DONE if name in moment.done else WAITING


def frame_layout(places: GraphLayout, most: int) -> Trace:
    """Return the axes of caption, graph and queue length; `most` is the maximum queue length."""
    layers = [place.layer for place in places.nodes.values()]
    ends = [place.across for place in places.nodes.values()]
    high = LAYER * (max(layers) + 2)
    inner = CAPTION + high + BETWEEN + QUEUE + BETWEEN
    graph = [(QUEUE + 2 * BETWEEN) / inner, 1 - CAPTION / inner]
    time = axis("time, ms", fixedrange=True, anchor=LENGTH)
    length = axis("operations in the queue", fixedrange=True, anchor=TIME, range=[-0.3, most + 0.7])
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


def _edges(places: GraphLayout, control: bool) -> Trace:
    """Return one trace with all control edges (dotted), or with all data edges."""
    paths = [_path(edge, path) for edge, path in places.edges.items() if edge.control == control]
    # A point of NaN between two edges separates them, because Plotly breaks a line at NaN.
    gap = np.full((1, 2), np.nan)
    points = np.concatenate([gap[:0], *(part for path in paths for part in (path, gap))])
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


NAMED = 4  # maximum number of operations that the caption names


def ready_animation(graph: StepGraph) -> Figure:
    """Animate a traced step, with a frame for each start or end of an operation.

    The number in a node's circle is the number of its unfinished dependencies. When an operation
    has no unfinished dependencies, it enters the queue and waits for a thread. A curve below the
    graph shows the queue length over time.

    Args:
        graph: Graph of at most 60 operations that compute.

    Raises:
        InvalidInput: More than 60 operations compute.
    """
    nodes, edges = nodes_of(graph)
    if len(nodes) > MOST:
        raise InvalidInput(
            f"{len(nodes)} operations are too many for one figure; allowed are at most {MOST}: "
            "trace a model with fewer layers"
        )
    queue = ready_queue(graph)
    moments = queue.moments()
    places = layout(nodes, edges)
    lengths = [len(moment.queued) for moment in moments]
    types = {operation.name: short(operation.op) for operation in graph.operations}
    started = _started(moments)
    captions = [
        _caption(moment, [types[name] for name in names], len(types))
        for moment, names in zip(moments, started, strict=True)
    ]
    states = [
        frame(nodes, places, moment, caption, length)
        for moment, caption, length in zip(moments, captions, lengths, strict=True)
    ]
    title = f"Ready queue of operations in one training step · {CLOCK}"
    return animation(
        fixed=fixed_traces(nodes, places, [1e3 * moment.time for moment in moments], lengths),
        states=states,
        layout=frame_layout(places, max(lengths)),
        title=title,
        alt=_in_words(title, queue, lengths),
        table=_as_table(moments, started, types),
        step="moment ",
        first=1,
        # The still picture is the middle frame, in which operations of all states are likely.
        first_frame=len(states) // 2,
    )


def queue_table(graph: StepGraph) -> pd.DataFrame:
    """Return a row for each operation that computes, ordered by ready time; times are in ms.

    `needs` is the operation's number of dependencies, and `wait_ms` is its time in the queue.
    """
    rows = [
        {
            "operation": entry.operation.name,
            "type": short(entry.operation.op),
            "needs": entry.needs,
            "ready_ms": 1e3 * entry.ready,
            "start_ms": 1e3 * entry.start,
            "stop_ms": 1e3 * entry.stop,
            "wait_ms": 1e3 * entry.wait,
        }
        for entry in ready_queue(graph).served
        if entry.timed
    ]
    return pd.DataFrame(rows)


def summarize_queue(graph: StepGraph) -> Markdown:
    """Summarize whether operations respected their dependencies, and how long the queue was."""
    queue = ready_queue(graph)
    waits, moments = queue.waited, queue.moments()
    early = queue.started_early()
    longest = waits[0]
    busy = max(len(moment.running) for moment in moments)
    rule = f"{len(early)} of {len(waits)} operations started before all their dependencies ended"
    findings = [
        Finding(
            rule,
            verdict=""
            if early
            else "each operation started after its count of unfinished dependencies was zero",
        ),
        Finding(
            f"At most {max(len(moment.queued) for moment in moments)} operations were in the "
            f"ready queue at the same time, and at most {busy} were running"
        ),
        Finding(
            f"**{longest.operation.name}** waited longest in the ready queue, "
            f"{1e3 * longest.wait:.3g} ms: ready at {1e3 * longest.ready:.4g} ms, started at "
            f"{1e3 * longest.start:.4g} ms"
        ),
    ]
    return sentences(findings)


def _started(moments: Sequence[Moment]) -> list[list[str]]:
    """Return, for each moment, the operations that have started since the previous moment."""
    earlier: set[str] = set()
    by_moment = []
    for moment in moments:
        active = {*moment.running, *moment.done}
        by_moment.append([name for name in moment.unresolved if name in active - earlier])
        earlier |= active
    return by_moment


def _caption(moment: Moment, started: Sequence[str], count: int) -> str:
    state = (
        f"{1e3 * moment.time:.3f} ms: {len(moment.queued)} in the queue, {len(moment.running)} "
        f"running, {len(moment.done)} of {count} finished"
    )
    more = f" and {len(started) - NAMED} more" if len(started) > NAMED else ""
    return state + (f"<br>started:  {', '.join(started[:NAMED])}{more}" if started else "")


def _in_words(title: str, queue: ReadyQueue, lengths: Sequence[int]) -> str:
    waits = [operation.wait for operation in queue.waited]
    details = [
        f"Animated. {title}",
        f"{plural(len(waits), 'operation')} with measured times",
        f"at most {max(lengths)} operations are in the queue",
        f"the longest wait in the queue is {seconds_text(max(waits[0], 0.0))}",
        f"events within {seconds_text(RESOLUTION)} of each other are shown in one frame",
    ]
    return ". ".join(details) + "."


def _as_table(
    moments: Sequence[Moment], started: Sequence[Sequence[str]], types: dict[str, str]
) -> str:
    def named(names: Sequence[str]) -> str:
        return ", ".join(f"{types[name]} ({name})" for name in names)

    rows = [
        [f"{1e3 * moment.time:.3f}", named(names), named(moment.queued), named(moment.running)]
        for moment, names in zip(moments, started, strict=True)
    ]
    return table(["ms", "started", "in the queue", "running"], rows)
