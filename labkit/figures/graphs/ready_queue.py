"""Ready queue of the executor in a traced step: an animation, a table, and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import plural, seconds_text
from labkit.figures.graphs.layered import MOST, Edge, Layout, Node, layout
from labkit.figures.graphs.step import CLOCK, nodes_of, short
from labkit.figures.kit.canvas import Figure, axis
from labkit.figures.kit.entries import INK, safe_text
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.frames import BARE, animation, legend, table, words
from labkit.figures.kit.panels import Trace
from labkit.records.ready_queue import RESOLUTION, Moment, ReadyQueue, ready_queue
from labkit.records.step_graph import StepGraph


class State(NamedTuple):
    """The look of an operation in a state: symbols distinguish states without colour, too."""

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


def fixed_traces(
    nodes: Sequence[Node], places: Layout, times: Sequence[float], lengths: Sequence[int]
) -> list[Trace]:
    """Return the traces of all frames: edges, types, and the queue length over time in ms."""
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


def frame(
    nodes: Sequence[Node], places: Layout, moment: Moment, caption: str, length: int
) -> list[Trace]:
    """Return the traces of one moment: nodes by state, the time, and the caption."""
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
    """Return the state of an operation at a moment."""
    if name in moment.running:
        return RUNNING
    if name in moment.queued:
        return QUEUED
    return DONE if name in moment.done else WAITING


def frame_layout(places: Layout, most: int) -> Trace:
    """Return the axes of caption, graph and queue length, which is at most `most`."""
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
    """Return all edges of one kind as one trace; control edges are dotted."""
    met = [_path(edge, path) for edge, path in places.edges.items() if edge.control == control]
    # Plotly breaks a line at NaN.
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


NAMED = 4  # operations that a line above the graph names


def ready_animation(graph: StepGraph) -> Figure:
    """Animate a traced step, a frame each time an operation begins or ends.

    A number in a circle says how many dependencies of the operation have not ended; at zero it
    is in the queue, until a thread takes it. Below, the length of the queue, over time as it was.

    Args:
        graph: of at most 60 operations that compute.

    Raises:
        InvalidInput: there are more.
    """
    nodes, edges = nodes_of(graph)
    if len(nodes) > MOST:
        raise InvalidInput(
            f"{len(nodes)} operations cannot be told apart in one figure; allowed: {MOST}; trace "
            "a model with fewer layers"
        )
    queue = ready_queue(graph)
    moments = queue.moments()
    places = layout(nodes, edges)
    lengths = [len(each.queued) for each in moments]
    types = {each.name: short(each.op) for each in graph.operations}
    begun = _begun(moments)
    captions = [
        _caption(moment, [types[name] for name in names], len(types))
        for moment, names in zip(moments, begun, strict=True)
    ]
    states = [
        frame(nodes, places, moment, caption, length)
        for moment, caption, length in zip(moments, captions, lengths, strict=True)
    ]
    title = f"Ready queue of one step · {CLOCK}"
    return animation(
        fixed=fixed_traces(nodes, places, [1e3 * each.time for each in moments], lengths),
        states=states,
        layout=frame_layout(places, max(lengths)),
        title=title,
        alt=_in_words(title, queue, lengths),
        table=_as_table(moments, begun, types),
        step="moment ",
        first=1,
        # Not the first one: a still picture shows some in each state.
        shown=len(states) // 2,
    )


def queue_table(graph: StepGraph) -> pd.DataFrame:
    """Return a row an operation that computes, in the order of readiness, with its times in ms.

    `needs` is the count with which it began, and `wait_ms` how long it was in the queue.
    """
    rows = [
        {
            "operation": each.operation.name,
            "type": short(each.operation.op),
            "needs": each.needs,
            "ready_ms": 1e3 * each.ready,
            "start_ms": 1e3 * each.start,
            "stop_ms": 1e3 * each.stop,
            "wait_ms": 1e3 * each.wait,
        }
        for each in ready_queue(graph).served
        if each.timed
    ]
    return pd.DataFrame(rows)


def queue_reading(graph: StepGraph) -> Markdown:
    """Say whether operations began in order, how long the queue was, and the longest wait."""
    queue = ready_queue(graph)
    waits, moments = queue.waited, queue.moments()
    early = queue.early()
    longest = waits[0]
    busy = max(len(each.running) for each in moments)
    rule = f"{len(early)} of {len(waits)} operations began before all they wait for had ended"
    findings = [
        Finding(rule, verdict="" if early else "each began when its count had fallen to zero"),
        Finding(
            f"At most {max(len(each.queued) for each in moments)} operations were in the queue at "
            f"a time, and at most {busy} ran"
        ),
        Finding(
            f"**{longest.operation.name}** waited longest in it, {1e3 * longest.wait:.3g} ms, "
            f"ready at {1e3 * longest.ready:.4g} ms and begun at {1e3 * longest.start:.4g} ms"
        ),
    ]
    return sentences(findings)


def _begun(moments: Sequence[Moment]) -> list[list[str]]:
    """Return the operations that began since the previous moment."""
    before: set[str] = set()
    by_moment = []
    for each in moments:
        here = {*each.running, *each.done}
        by_moment.append([name for name in each.unresolved if name in here - before])
        before |= here
    return by_moment


def _caption(moment: Moment, begun: Sequence[str], count: int) -> str:
    state = (
        f"{1e3 * moment.time:.3f} ms: in the queue {len(moment.queued)}, running "
        f"{len(moment.running)}, ended {len(moment.done)} of {count}"
    )
    more = f" and {len(begun) - NAMED} more" if len(begun) > NAMED else ""
    return state + (f"<br>begun: {', '.join(begun[:NAMED])}{more}" if begun else "")


def _in_words(title: str, queue: ReadyQueue, lengths: Sequence[int]) -> str:
    waits = [each.wait for each in queue.waited]
    details = [
        f"Animated. {title}",
        f"{plural(len(waits), 'operation')} with times",
        f"the queue holds {max(lengths)} at most",
        f"the longest wait in it is {seconds_text(max(waits[0], 0.0))}",
        f"what happens within {seconds_text(RESOLUTION)} is one frame",
    ]
    return ". ".join(details) + "."


def _as_table(
    moments: Sequence[Moment], begun: Sequence[Sequence[str]], types: dict[str, str]
) -> str:
    def named(names: Sequence[str]) -> str:
        return ", ".join(f"{types[name]} ({name})" for name in names)

    rows = [
        [f"{1e3 * each.time:.3f}", named(names), named(each.queued), named(each.running)]
        for each, names in zip(moments, begun, strict=True)
    ]
    return table(["ms", "begun", "in the queue", "running"], rows)
