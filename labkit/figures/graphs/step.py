"""Executed training steps: operations, transfers between devices, and control dependencies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from labkit.common.errors import InvalidInput
from labkit.common.units import bytes_text, plural, seconds_text
from labkit.figures.graphs.layered import DrawnNode, Edge, collapsed, layered
from labkit.figures.kit.canvas import Figure
from labkit.figures.kit.entries import INK, Finding, Markdown, sentences
from labkit.figures.kit.lanes import BarKind, GanttPanel, lanes
from labkit.figures.kit.panels import Trace
from labkit.records.step_graph import Flow, Operation, StepGraph, Transfer

# `SHORT` contains the common names of some operation types; figures show all other types with
# TensorFlow's names.
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


def drawn_step(graph: StepGraph, title: str) -> Figure:
    """Draw the executed graph from top to bottom, with cheap operations merged.

    Args:
        graph: Traced step, the result of `labkit.bench.step_process.trace_variants`.
        title: Description of the training step, for the title.
    """
    nodes, edges = nodes_of(graph)
    few = collapsed(nodes, edges)
    remark = f"{_operation_counts(graph, nodes)}; the step took {seconds_text(graph.seconds)}"
    return layered(*few, title=f"{title} · {CLOCK}", remark=remark)


def partitioned_step(graph: StepGraph, title: str) -> Figure:
    """Draw the executed graph; each Send and Recv operation of TensorFlow has a separate node."""
    nodes, edges = nodes_of(graph)
    remark = _operation_counts(graph, nodes)
    nodes, edges = _with_send_receive(graph, nodes, edges)
    few = collapsed(nodes, edges)
    return layered(*few, title=f"{title} · {CLOCK}", remark=remark)


def nodes_of(graph: StepGraph) -> tuple[list[DrawnNode], list[Edge]]:
    """Return the operations as nodes with type, device and time, and the edges between them.

    Arguments and constants exist before the step starts. They are about half of all operations.
    The result omits arguments and constants that stay on one device.
    """
    reads, sent = {flow.target for flow in graph.flows}, {t.source for t in graph.transfers}
    shown = [
        operation
        for operation in graph.operations
        if operation.name in reads | sent or not math.isnan(operation.start)
    ]
    shown_names = {operation.name for operation in shown}
    nodes = [
        DrawnNode(
            operation.name,
            short(operation.op),
            operation.device,
            _timing(operation),
            operation.seconds,
        )
        for operation in shown
    ]
    edges = [
        Edge(flow.source, flow.target, flow.bytes, flow.control)
        for flow in graph.flows
        if flow.source in shown_names
    ]
    return nodes, edges


def _operation_counts(graph: StepGraph, nodes: list[DrawnNode]) -> str:
    omitted = len(graph.operations) - len(nodes)
    return f"{len(nodes)} operations; {omitted} arguments and constants are not drawn"


def short(op: str) -> str:
    """Return the name that figures show for an operation type."""
    return SHORT.get(op, op)


def _timing(operation: Operation) -> str:
    if math.isnan(operation.start):
        return "no computation"
    return (
        f"starts {seconds_text(operation.start)} after the start of the step, takes "
        f"{seconds_text(operation.seconds)}"
    )


def _with_send_receive(
    graph: StepGraph, nodes: list[DrawnNode], edges: list[Edge]
) -> tuple[list[DrawnNode], list[Edge]]:
    """Replace each edge between devices by a path through its send and receive operations."""
    device_of = {node.name: node.device for node in nodes}
    transfers = {(transfer.source, transfer.receiver): transfer for transfer in graph.transfers}
    results: dict[Edge, None] = {}
    for edge in edges:
        leaves = device_of[edge.source] != device_of[edge.target]
        transfer = transfers.get((edge.source, device_of[edge.target])) if leaves else None
        if transfer is None:
            results[edge] = None
        else:
            results[Edge(edge.source, transfer.send, transfer.bytes)] = None
            results[Edge(transfer.send, transfer.receive, transfer.bytes)] = None
            results[Edge(transfer.receive, edge.target, transfer.bytes, edge.control)] = None
    return [*nodes, *_send_receive_nodes(graph)], list(results)


def _send_receive_nodes(graph: StepGraph) -> Iterator[DrawnNode]:
    for transfer in graph.transfers:
        details = transfer.tensor_name
        # An infinite weight prevents the merging of send and receive nodes. The function
        # `collapsed` merges nodes of low weight first.
        yield DrawnNode(transfer.send, "send", transfer.sender, details, math.inf)
        yield DrawnNode(transfer.receive, "receive", transfer.receiver, details, math.inf)


# `HOLDS` lists the operation types that compute nothing: constants, results and no-ops.
HOLDS = ("Const", "_Retval", "NoOp")
FEW = 36  # maximum number of nodes for which texts have enough room
LETTERS = 16  # maximum letters of a node's text; the hover text has the full name


def step_picture(
    graph: StepGraph,
    title: str = "Executed step",
    most: int = FEW,
    log: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the operations in layers, coloured by device; cheap neighbours on a device are merged.

    Constants, results, no-ops and handles of variables are omitted, because they compute nothing.

    Args:
        graph: Traced step, the result of `labkit.worker.executed_step.step_graph`.
        title: Description of the step; the figure title adds the clock and the network.
        most: Maximum number of nodes to draw. Cheap operations are merged until at most `most`
            nodes remain.
        log: For each operation, its device in TensorFlow's placement log, which the hover texts
            show. By default, the hover texts show no devices from a log.

    Raises:
        InvalidInput: No operation computes, or too many nodes for a figure remain after merging.
    """
    handles = {f.source for f in graph.flows if f.bytes == 0 and not f.control}
    shown = [
        operation
        for operation in graph.operations
        if operation.op not in HOLDS and not (operation.op == "_Arg" and operation.name in handles)
    ]
    names = {operation.name for operation in shown}
    nodes = [
        DrawnNode(
            operation.name,
            _short(operation.op),
            operation.device,
            f"{operation.op}, {_duration(operation.seconds)}{_log_text(operation.name, log)}",
            operation.seconds,
        )
        for operation in shown
    ]
    flows = [flow for flow in graph.flows if flow.source in names and flow.target in names]
    few, edges = collapsed(nodes, _edges(flows), most)
    merged = len(shown) - len(few)
    remark = (
        f"{merged} operations are merged with a neighbouring operation on the same device"
        if merged
        else ""
    )
    return layered(few, edges, f"{title} · wall clock · network not emulated", remark)


def _edges(flows: Sequence[Flow]) -> list[Edge]:
    """Convert flows to edges; omit a control edge if a data edge connects the same nodes."""
    read = {(flow.source, flow.target) for flow in flows if not flow.control}
    return [
        Edge(flow.source, flow.target, flow.bytes, flow.control)
        for flow in flows
        if not flow.control or (flow.source, flow.target) not in read
    ]


def _short(op: str) -> str:
    """Shorten an operation type, such as `AssignSubVariableOp` to `AssignSub`."""
    word = op.lstrip("_").removesuffix("Op").removesuffix("Variable")
    return word if len(word) <= LETTERS else f"{word[: LETTERS - 1]}…"


def _log_text(name: str, log: Mapping[str, str] | None) -> str:
    """Return hover text with an operation's logged device, or with the words "not in the log"."""
    if log is None:
        return ""
    return (
        f", placed on {log[name]} according to TensorFlow's placement log"
        if name in log
        else ", not in TensorFlow's placement log"
    )


def _duration(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "unknown time"


def transfers_table(graph: StepGraph) -> pd.DataFrame:
    """Return a table with one row per tensor that a device sends to another device.

    `made_ms` is the time at which the operation that produces the tensor ends. `used_ms` is the
    time at which the first operation that reads the tensor on the receiving device starts.
    `between_ms` is `used_ms` - `made_ms`, and includes copying and the wait in the queue. Times are
    missing for operations without an event in TensorFlow's profiler, such as arguments.
    """
    at = {operation.name: operation for operation in graph.operations}
    rows = [_transfer_row(transfer, graph, at) for transfer in graph.transfers]
    table = pd.DataFrame(rows, columns=_COLUMNS)
    return table.sort_values("made_ms", na_position="first", ignore_index=True)


_COLUMNS = [
    *("tensor", "from", "to", "send", "receive"),
    *("bytes", "made_ms", "used_ms", "between_ms"),
]


def _transfer_row(
    transfer: Transfer, graph: StepGraph, operations: dict[str, Operation]
) -> dict[str, str | float]:
    readers = [
        operations[flow.target].start
        for flow in graph.flows
        if flow.source == transfer.source and operations[flow.target].device == transfer.receiver
    ]
    made = 1e3 * operations[transfer.source].stop
    used = 1e3 * min(readers, default=float("nan"))
    names = (
        transfer.tensor_name,
        transfer.sender,
        transfer.receiver,
        transfer.send,
        transfer.receive,
    )
    values = (*names, transfer.bytes, made, used, used - made)
    return dict(zip(_COLUMNS, values, strict=True))


def summarize_transfers(graph: StepGraph) -> Markdown:
    """Summarize the transfers between devices (send and receive): number, bytes and times."""
    table = transfers_table(graph)
    if table.empty:
        return sentences(
            [
                Finding(
                    "No edge of the graph connects two devices, so TensorFlow sends and receives "
                    "nothing"
                )
            ]
        )
    large = table.loc[table["bytes"].idxmax()]
    ends = int((table["bytes"] == 0).sum())
    findings = [
        Finding(
            f"{plural(len(table), 'pair')} of send and receive operations, one for each edge "
            "between devices; the tensor's name matches a send with its receive"
        ),
        Finding(
            f"The largest tensor is **{large['tensor']}**, {bytes_text(large['bytes'])} from "
            f"{large['from']} to {large['to']}"
        ),
    ]
    if ends:
        details = "carries no data" if ends == 1 else "carry no data"
        findings.append(
            Finding(
                f"{ends} of {len(table)} pairs {details}; an edge without data, called a control "
                "dependency, only fixes the order of two operations"
            )
        )
    timed = table.dropna(subset="between_ms")
    if len(timed):
        longest = timed.loc[timed["between_ms"].idxmax()]
        findings.append(
            Finding(
                f"**{longest['tensor']}** is the tensor with the longest time from its creation "
                f"to its first use: {longest['between_ms']:.3g} ms of copying and "
                "queueing"
            )
        )
    return sentences(findings)


LANE = 26  # height of a lane of operations in pixels
LANES = ("other operations", "gradients", "updates")
DETAILS = "%{customdata[0]}"
# The colours are from Okabe and Ito (2008), as in the module `entries`. Readers with any colour
# vision can tell the colours apart.
KINDS = dict(
    zip(
        LANES,
        (
            BarKind("other operations", "#56B4E9", DETAILS),
            BarKind("computes a gradient", "#009E73", DETAILS),
            BarKind("updates a variable", "#D55E00", DETAILS),
        ),
        strict=True,
    )
)


def control_timeline(graphs: Mapping[str, StepGraph]) -> Figure:
    """Draw a Gantt chart per graph, and mark the end of the last gradient.

    Args:
        graphs: Graphs of the same training step with different control dependencies, with titles as
            keys.

    Raises:
        InvalidInput: A step updates no variable, so there is no order of gradients and updates.
    """
    table = control_order(graphs)
    drawn = {what: _bars(graph) for what, graph in graphs.items()}
    end = max(float((rows["start"] + rows["length"]).max()) for rows in drawn.values())
    panels, words = [], []
    for what, rows in drawn.items():
        group = table.loc[what]
        details = (
            f"{group['early']} of {group['updates']} updates start before the last gradient is "
            "complete; "
            f"{plural(int(group['control_edges']), 'control edge')}"
        )
        mark = _mark(group["last_gradient_ms"])
        panels.append(GanttPanel(f"{what}\n{details}", LANES, rows, ("details",), [mark]))
        words.append(f"{what}: {details}")
    title = f"Control dependencies in one training step · {CLOCK}"
    return lanes(
        panels, KINDS, title, "vertical line: the last gradient is complete", words, LANE, end
    )


def control_order(graphs: Mapping[str, StepGraph]) -> pd.DataFrame:
    """Return a row for each graph: numbers of control edges, updates, and early updates.

    An update is early if it starts before the last operation that computes a gradient has ended.
    `last_gradient_ms` is an end time, `first_update_ms` is a start time, and `step_ms` is a
    duration. All three are from the same traced step.
    """
    rows = {what: _order_row(graph) for what, graph in graphs.items()}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("step")


def summarize_control(graphs: Mapping[str, StepGraph]) -> Markdown:
    """State how many weight updates start before the last gradient is complete."""
    findings = []
    for what, row in control_order(graphs).iterrows():
        findings.append(
            Finding(
                f"**{what}**",
                details=(
                    f"{row['early']:.0f} of {row['updates']:.0f} updates started before the last "
                    f"gradient was complete, at {row['last_gradient_ms']:.4g} ms",
                    f"the first update started at {row['first_update_ms']:.4g} ms",
                ),
                verdict=_verdict(row),
            )
        )
    return sentences(findings)


def _verdict(row: pd.Series) -> str:
    """State whether updates may start before the last gradient, and whether any of them does."""
    if not row["gated"]:
        return (
            "updates before the last gradient are allowed, because not every update waits "
            "for every gradient"
        )
    return (
        f"updates before the last gradient are not allowed, but {row['early']:.0f} occurred"
        if row["early"]
        else "updates before the last gradient are not allowed, and none occurred"
    )


def _parts(graph: StepGraph) -> dict[str, list[Operation]]:
    """Return the operations that the profiler timed, for each lane: other, gradients, updates."""
    timed = {
        operation.name: operation
        for operation in graph.operations
        if not math.isnan(operation.start)
    }
    updates = {name for name, operation in timed.items() if operation.op == UPDATE}
    if not updates:
        raise InvalidInput("the given step updates no variable: give the graph of a training step")
    # An operation counts as a gradient if it is timed and an update reads its result.
    gradient_names = {
        f.source for f in graph.flows if f.target in updates and not f.control
    } & timed.keys()
    results: dict[str, list[Operation]] = {lane: [] for lane in LANES}
    for name, operation in timed.items():
        lane = LANES[2] if name in updates else LANES[1] if name in gradient_names else LANES[0]
        results[lane].append(operation)
    return results


def _order_row(graph: StepGraph) -> dict[str, float]:
    parts = _parts(graph)
    _, gradients, updates = (parts[lane] for lane in LANES)
    last = max(gradient.stop for gradient in gradients)
    edges = {(f.source, f.target) for f in graph.flows}
    gated = all((g.name, u.name) in edges for g in gradients for u in updates)
    return {
        "control_edges": sum(flow.control for flow in graph.flows),
        "gated": gated,
        "updates": len(updates),
        "early": sum(update.start < last for update in updates),
        "last_gradient_ms": 1e3 * last,
        "first_update_ms": 1e3 * min(update.start for update in updates),
        "step_ms": 1e3 * graph.seconds,
    }


def _bars(graph: StepGraph) -> pd.DataFrame:
    rows = [
        {
            "lane": lane,
            "kind": lane,
            "start": 1e3 * operation.start,
            "length": 1e3 * (operation.stop - operation.start),
            "text": "",
            "details": f"{short(operation.op)} {operation.name}",
        }
        for lane, operations in _parts(graph).items()
        for operation in operations
    ]
    return pd.DataFrame(rows)


def _mark(time: float) -> Trace:
    """Return a vertical line through all lanes at the time (ms) of the last gradient."""
    return {
        "x": [time] * len(LANES),
        "y": list(LANES),
        "mode": "lines",
        "line": {"color": INK, "dash": "dot", "width": 2},
        "hovertemplate": "the last gradient is complete<extra></extra>",
        "showlegend": False,
    }
