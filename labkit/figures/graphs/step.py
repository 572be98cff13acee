"""A step of TensorFlow as it ran: its operations, drawn where they were placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.common.units import seconds_text
from labkit.figures.graphs.collapse import collapsed
from labkit.figures.graphs.layered import Edge, Node, layered
from labkit.records.step_graph import Flow, StepGraph

if TYPE_CHECKING:
    from labkit.figures.kit.canvas import Figure

# What only holds a value for another one; its device is that of a handle, a constant, a result.
HOLDS = ("Const", "_Retval", "NoOp")
FEW = 36  # nodes, whose words have room
LETTERS = 16  # of such a word; the pointer is told the whole name


def step_picture(
    graph: StepGraph,
    title: str = "A step as it ran",
    most: int = FEW,
    log: Mapping[str, str] | None = None,
) -> Figure:
    """The operations in layers, by device; cheap neighbours on one device are drawn as one node.

    Constants, results and handles of variables are left out, as nothing is computed there.

    Args:
        graph: of `labkit.worker.executed_step.step_graph`.
        title: what it is; clock and network are added.
        most: nodes that are drawn.
        log: device by operation, as TensorFlow's placement log says; the pointer is told.

    Raises:
        InvalidInput: no operation computes, or more nodes are left than can be told apart.
    """
    handles = {f.source for f in graph.flows if f.bytes == 0 and not f.control}
    shown = [
        each
        for each in graph.operations
        if each.op not in HOLDS and not (each.op == "_Arg" and each.name in handles)
    ]
    names = {each.name for each in shown}
    nodes = [
        Node(
            each.name,
            _short(each.op),
            each.device,
            f"{each.op}, {_said(each.seconds)}{_logged(each.name, log)}",
            each.seconds,
        )
        for each in shown
    ]
    kept = [flow for flow in graph.flows if flow.source in names and flow.target in names]
    few, edges = collapsed(nodes, _edges(kept), most)
    left = len(shown) - len(few)
    remark = f"{left} operations are drawn inside a neighbour on their device" if left else ""
    return layered(few, edges, f"{title} · wall clock · network not emulated", remark)


def _edges(flows: Sequence[Flow]) -> list[Edge]:
    """A control edge is left out where the same two are joined by what is read."""
    read = {(flow.source, flow.target) for flow in flows if not flow.control}
    return [
        Edge(flow.source, flow.target, flow.bytes, flow.control)
        for flow in flows
        if not flow.control or (flow.source, flow.target) not in read
    ]


def _short(op: str) -> str:
    """`AssignSubVariableOp` as `AssignSub`"""
    word = op.lstrip("_").removesuffix("Op").removesuffix("Variable")
    return word if len(word) <= LETTERS else f"{word[: LETTERS - 1]}…"


def _logged(name: str, log: Mapping[str, str] | None) -> str:
    """What the placement log has of an operation; some are made after placing."""
    if log is None:
        return ""
    return f", placed on {log[name]} by the log" if name in log else ", not in the log"


def _said(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "no time known"
