"""A step that ran, as nodes and edges of a picture, with or without its sends and receives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.common.units import seconds_text
from labkit.figures.graphs.collapse import collapsed
from labkit.figures.graphs.layered import Edge, Node, layered
from labkit.records.step_graph import Operation, StepGraph

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

# Operations by the words that a reader knows them by; the others keep TensorFlow's.
SHORT = {
    "_Arg": "argument",
    "_Retval": "result",
    "_FusedMatMul": "FusedMatMul",
    "ReadVariableOp": "read",
    "ResourceApplyKerasMomentum": "update",
    "SparseSoftmaxCrossEntropyWithLogits": "cross-entropy",
}
UPDATE = "ResourceApplyKerasMomentum"
CLOCK = "wall clock · network not used"


def drawn_step(graph: StepGraph, what: str) -> Figure:
    """The graph that ran, from above to below; of many operations the cheap ones are joined.

    Args:
        graph: of `labkit.bench.step_graphs.measure`.
        what: which step it is, for the title.
    """
    nodes, edges = nodes_of(graph)
    found = collapsed(nodes, edges)
    remark = f"{_counted(graph, nodes)}; the step took {seconds_text(graph.seconds)}"
    return layered(*found, title=f"{what} · {CLOCK}", remark=remark)


def partitioned_step(graph: StepGraph, what: str) -> Figure:
    """The same with a node for each send and each receive that TensorFlow has put in."""
    nodes, edges = nodes_of(graph)
    remark = _counted(graph, nodes)
    nodes, edges = _with_ends(graph, nodes, edges)
    found = collapsed(nodes, edges)
    return layered(*found, title=f"{what} · {CLOCK}", remark=remark)


def nodes_of(graph: StepGraph) -> tuple[list[Node], list[Edge]]:
    """Each operation with its type, device and time, and who waits for whom.

    Arguments and constants are left out, but those that are sent to another device: they are there
    before the step begins, and as many as all the rest.
    """
    reads, sent = {each.target for each in graph.flows}, {t.source for t in graph.transfers}
    shown = [
        each for each in graph.operations if each.name in reads | sent or not math.isnan(each.start)
    ]
    kept = {each.name for each in shown}
    nodes = [
        Node(each.name, short(each.op), each.device, _said(each), each.seconds) for each in shown
    ]
    edges = [
        Edge(each.source, each.target, each.bytes, each.control)
        for each in graph.flows
        if each.source in kept
    ]
    return nodes, edges


def _counted(graph: StepGraph, nodes: list[Node]) -> str:
    left = len(graph.operations) - len(nodes)
    return f"{len(nodes)} operations, and {left} arguments and constants that are not drawn"


def short(op: str) -> str:
    """The type of an operation, as it is written into figures."""
    return SHORT.get(op, op)


def _said(each: Operation) -> str:
    if math.isnan(each.start):
        return "computes nothing"
    return f"{seconds_text(each.start)} after the step began, for {seconds_text(each.seconds)}"


def _with_ends(
    graph: StepGraph, nodes: list[Node], edges: list[Edge]
) -> tuple[list[Node], list[Edge]]:
    """In place of an edge between devices: to a send, from there to its receive, and on."""
    on = {node.name: node.device for node in nodes}
    ways = {(each.source, each.receiver): each for each in graph.transfers}
    found: dict[Edge, None] = {}
    for edge in edges:
        leaves = on[edge.source] != on[edge.target]
        way = ways.get((edge.source, on[edge.target])) if leaves else None
        if way is None:
            found[edge] = None
        else:
            found[Edge(edge.source, way.send, way.bytes)] = None
            found[Edge(way.send, way.receive, way.bytes)] = None
            found[Edge(way.receive, edge.target, way.bytes, edge.control)] = None
    return [*nodes, *_ends(graph)], list(found)


def _ends(graph: StepGraph) -> Iterator[Node]:
    for each in graph.transfers:
        said = each.tensor_name
        # Weights without end: what is light may be drawn inside its neighbour.
        yield Node(each.send, "send", each.sender, said, math.inf)
        yield Node(each.receive, "receive", each.receiver, said, math.inf)
