"""Executed training steps: operations by device, sends and receives, and control dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, plural, seconds_text
from labkit.figures.graphs.layered import Edge, Node, collapsed, layered
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK
from labkit.figures.kit.findings import Finding, Markdown, sentences
from labkit.figures.kit.lanes import Kind, Lanes, lanes
from labkit.figures.kit.panels import Trace
from labkit.records.step_graph import Flow, Operation, StepGraph, Transfer

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
    """Draw the executed graph from top to bottom; cheap operations are joined.

    Args:
        graph: of `labkit.bench.step_graphs.measure`.
        what: which step it is, for the title.
    """
    nodes, edges = nodes_of(graph)
    few = collapsed(nodes, edges)
    remark = f"{_counted(graph, nodes)}; the step took {seconds_text(graph.seconds)}"
    return layered(*few, title=f"{what} · {CLOCK}", remark=remark)


def partitioned_step(graph: StepGraph, what: str) -> Figure:
    """Draw the executed graph with a node for each send and receive of TensorFlow."""
    nodes, edges = nodes_of(graph)
    remark = _counted(graph, nodes)
    nodes, edges = _with_ends(graph, nodes, edges)
    few = collapsed(nodes, edges)
    return layered(*few, title=f"{what} · {CLOCK}", remark=remark)


def nodes_of(graph: StepGraph) -> tuple[list[Node], list[Edge]]:
    """Return operations with type, device and time, and the edges between them.

    Arguments and constants are left out, but those that are sent to another device: they are there
    before the step begins, and as many as all the rest.
    """
    reads, sent = {each.target for each in graph.flows}, {t.source for t in graph.transfers}
    shown = [
        each for each in graph.operations if each.name in reads | sent or not math.isnan(each.start)
    ]
    kept = {each.name for each in shown}
    nodes = [
        Node(each.name, short(each.op), each.device, _timing(each), each.seconds) for each in shown
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
    """Return the type of an operation as figures show it."""
    return SHORT.get(op, op)


def _timing(each: Operation) -> str:
    if math.isnan(each.start):
        return "computes nothing"
    return f"{seconds_text(each.start)} after the step began, for {seconds_text(each.seconds)}"


def _with_ends(
    graph: StepGraph, nodes: list[Node], edges: list[Edge]
) -> tuple[list[Node], list[Edge]]:
    """Replace each edge between devices by edges to its send, its receive, and its target."""
    on = {node.name: node.device for node in nodes}
    ways = {(each.source, each.receiver): each for each in graph.transfers}
    results: dict[Edge, None] = {}
    for edge in edges:
        leaves = on[edge.source] != on[edge.target]
        way = ways.get((edge.source, on[edge.target])) if leaves else None
        if way is None:
            results[edge] = None
        else:
            results[Edge(edge.source, way.send, way.bytes)] = None
            results[Edge(way.send, way.receive, way.bytes)] = None
            results[Edge(way.receive, edge.target, way.bytes, edge.control)] = None
    return [*nodes, *_ends(graph)], list(results)


def _ends(graph: StepGraph) -> Iterator[Node]:
    for each in graph.transfers:
        details = each.tensor_name
        # An infinite weight, because light nodes may be drawn inside their neighbours.
        yield Node(each.send, "send", each.sender, details, math.inf)
        yield Node(each.receive, "receive", each.receiver, details, math.inf)


# What only holds a value for another one; its device is that of a handle, a constant, a result.
HOLDS = ("Const", "_Retval", "NoOp")
FEW = 36  # nodes with room for their texts
LETTERS = 16  # of a text; the hover text has the whole name


def step_picture(
    graph: StepGraph,
    title: str = "A step as it ran",
    most: int = FEW,
    log: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the operations in layers, by device; cheap neighbours on a device are one node.

    Constants, results and handles of variables are left out, as nothing is computed there.

    Args:
        graph: of `labkit.worker.executed_step.step_graph`.
        title: of the step; clock and network are added.
        most: nodes that are drawn.
        log: device by operation from TensorFlow's placement log, for the hover texts.

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
            f"{each.op}, {_duration(each.seconds)}{_logged(each.name, log)}",
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
    """Return the edges; a control edge is left out beside a data edge of the same nodes."""
    read = {(flow.source, flow.target) for flow in flows if not flow.control}
    return [
        Edge(flow.source, flow.target, flow.bytes, flow.control)
        for flow in flows
        if not flow.control or (flow.source, flow.target) not in read
    ]


def _short(op: str) -> str:
    """Return `AssignSub` for `AssignSubVariableOp`."""
    word = op.lstrip("_").removesuffix("Op").removesuffix("Variable")
    return word if len(word) <= LETTERS else f"{word[: LETTERS - 1]}…"


def _logged(name: str, log: Mapping[str, str] | None) -> str:
    """Return the device in the placement log; operations made after placing have none."""
    if log is None:
        return ""
    return f", placed on {log[name]} by the log" if name in log else ", not in the log"


def _duration(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "no time known"


def transfers_table(graph: StepGraph) -> pd.DataFrame:
    """Return a row a pair of send and receive, in the order of production.

    `made_ms` and `used_ms` are when its source ended and when the first operation that reads it on
    the other device began, `between_ms` what lies between: copying, and waiting in the queue there.
    They are missing where TensorFlow's profiler has no event, as of arguments.
    """
    at = {each.name: each for each in graph.operations}
    rows = [_transfer_row(each, graph, at) for each in graph.transfers]
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table.sort_values("made_ms", na_position="first", ignore_index=True)


_COLUMNS = [
    *("tensor", "from", "to", "send", "receive"),
    *("bytes", "made_ms", "used_ms", "between_ms"),
]


def _transfer_row(
    each: Transfer, graph: StepGraph, at: dict[str, Operation]
) -> dict[str, str | float]:
    readers = [
        at[flow.target].start
        for flow in graph.flows
        if flow.source == each.source and at[flow.target].device == each.receiver
    ]
    made = 1e3 * at[each.source].stop
    used = 1e3 * min(readers, default=float("nan"))
    names = (each.tensor_name, each.sender, each.receiver, each.send, each.receive)
    values = (*names, each.bytes, made, used, used - made)
    return dict(zip(_COLUMNS, values, strict=True))


def transfers_reading(graph: StepGraph) -> Markdown:
    """Say how many pairs of send and receive there are, what they carry, and their times."""
    table = transfers_table(graph)
    if table.empty:
        return sentences([Finding("No edge leaves its device: there is no send and no receive")])
    large = table.loc[table["bytes"].idxmax()]
    ends = int((table["bytes"] == 0).sum())
    findings = [
        Finding(
            f"{plural(len(table), 'pair')} of send and receive stand where an edge leaves its "
            "device, and find each other by the name of the tensor"
        ),
        Finding(
            f"The largest is **{large['tensor']}**, {bytes_text(large['bytes'])} from "
            f"{large['from']} to {large['to']}"
        ),
    ]
    if ends:
        details = "carries nothing" if ends == 1 else "carry nothing"
        findings.append(Finding(f"{ends} of {len(table)} {details}: a control dependency crosses"))
    timed = table.dropna(subset="between_ms")
    if len(timed):
        longest = timed.loc[timed["between_ms"].idxmax()]
        findings.append(
            Finding(
                f"From its source's end to its first reader's start **{longest['tensor']}** took "
                f"longest, {longest['between_ms']:.3g} ms of copying and queueing"
            )
        )
    return sentences(findings)


LANE = 26  # pixels a lane
LANES = ("other operations", "gradients", "updates")
SAID = "%{customdata[0]}"
# Colours of Okabe and Ito (2008), as in `entries`, distinct for any colour vision.
KINDS = dict(
    zip(
        LANES,
        (
            Kind("other operations", "#56B4E9", SAID),
            Kind("makes a gradient", "#009E73", SAID),
            Kind("changes a variable", "#D55E00", SAID),
        ),
        strict=True,
    )
)


def control_timeline(graphs: Mapping[str, StepGraph]) -> Figure:
    """Draw a Gantt chart a graph on the same scale, with a line at the last gradient.

    Args:
        graphs: by title; the same training step with other control dependencies.

    Raises:
        InvalidInput: a step changes no variable, so that there is no order to see.
    """
    table = control_order(graphs)
    drawn = {what: _bars(graph) for what, graph in graphs.items()}
    end = max(float((rows["start"] + rows["length"]).max()) for rows in drawn.values())
    panels, words = [], []
    for what, rows in drawn.items():
        group = table.loc[what]
        details = (
            f"{group['early']} of {group['updates']} updates begin before the last gradient is "
            "there; "
            f"{plural(int(group['control_edges']), 'control edge')}"
        )
        mark = _mark(group["last_gradient_ms"])
        panels.append(Lanes(f"{what}\n{details}", LANES, rows, ("details",), [mark]))
        words.append(f"{what}: {details}")
    title = f"Control dependencies in one step · {CLOCK}"
    return lanes(panels, KINDS, title, "line: the last gradient is there", words, LANE, end)


def control_order(graphs: Mapping[str, StepGraph]) -> pd.DataFrame:
    """Return a row a graph: its control edges, its updates, and the number of early updates.

    Early is an update that starts before the last operation that makes a gradient has ended.
    `last_gradient_ms`, `first_update_ms` and `step_ms` are from the same traced step.
    """
    rows = {what: _order_row(graph) for what, graph in graphs.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def control_reading(graphs: Mapping[str, StepGraph]) -> Markdown:
    """Say for each graph whether updates may begin before the last gradient, and did."""
    findings = []
    for what, row in control_order(graphs).iterrows():
        findings.append(
            Finding(
                f"**{what}**",
                details=(
                    f"{row['early']:.0f} of {row['updates']:.0f} updates began before the last "
                    f"gradient was there, at {row['last_gradient_ms']:.4g} ms",
                    f"the first update began at {row['first_update_ms']:.4g} ms",
                ),
                verdict=_verdict(row),
            )
        )
    return sentences(findings)


def _verdict(row: pd.Series) -> str:
    """Whether updates had to wait, and did."""
    if not row["gated"]:
        return "some may, as not every update waits for every gradient"
    return f"none may, yet {row['early']:.0f} did" if row["early"] else "none may, and none did"


def _parts(graph: StepGraph) -> dict[str, list[Operation]]:
    """Return the operations with an event, by lane."""
    timed = {each.name: each for each in graph.operations if not math.isnan(each.start)}
    updates = {name for name, each in timed.items() if each.op == UPDATE}
    if not updates:
        raise InvalidInput("this step changes no variable: give one that trains")
    # What an update reads, and was computed.
    made = {f.source for f in graph.flows if f.target in updates and not f.control} & timed.keys()
    results: dict[str, list[Operation]] = {lane: [] for lane in LANES}
    for name, each in timed.items():
        lane = LANES[2] if name in updates else LANES[1] if name in made else LANES[0]
        results[lane].append(each)
    return results


def _order_row(graph: StepGraph) -> dict[str, float]:
    parts = _parts(graph)
    _, gradients, updates = (parts[lane] for lane in LANES)
    last = max(each.stop for each in gradients)
    held = {(f.source, f.target) for f in graph.flows}
    gated = all((g.name, u.name) in held for g in gradients for u in updates)
    return {
        "control_edges": sum(flow.control for flow in graph.flows),
        "gated": gated,
        "updates": len(updates),
        "early": sum(each.start < last for each in updates),
        "last_gradient_ms": 1e3 * last,
        "first_update_ms": 1e3 * min(each.start for each in updates),
        "step_ms": 1e3 * graph.seconds,
    }


def _bars(graph: StepGraph) -> pd.DataFrame:
    rows = [
        {
            "lane": lane,
            "kind": lane,
            "start": 1e3 * each.start,
            "length": 1e3 * (each.stop - each.start),
            "text": "",
            "details": f"{short(each.op)} {each.name}",
        }
        for lane, operations in _parts(graph).items()
        for each in operations
    ]
    return pd.DataFrame(rows)


def _mark(time: float) -> Trace:
    """Return a line through all lanes."""
    return {
        "x": [time] * len(LANES),
        "y": list(LANES),
        "mode": "lines",
        "line": {"color": INK, "dash": "dot", "width": 2},
        "hovertemplate": "the last gradient is there<extra></extra>",
        "showlegend": False,
    }
