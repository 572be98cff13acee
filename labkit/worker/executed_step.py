"""What TensorFlow ran when it ran a step: operations where they were placed, copies, and times."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.common.errors import InvalidInput, LabkitError
from labkit.records.step_graph import Flow, Operation, StepGraph, Transfer

if TYPE_CHECKING:
    import tensorflow as tf

    # TensorFlow ships its protocol buffers without types; these names say which one is meant.
    GraphDef: TypeAlias = Any
    NodeDef: TypeAlias = Any

STEP = "labkit step"  # as the profiler's events of whole steps are called
HIDDEN = ("_Send", "_Recv")  # the two ends of a copy, drawn as one edge
BACK = "NextIteration"  # its edge leads back to the head of a loop


def step_graph(
    step: Callable[..., object], *arguments: tf.Tensor, repeats: int = 5, warm: int = 3
) -> StepGraph:
    """Run a step, and read what TensorFlow made of it and how long each operation took.

    The graph is that of the partitions which TensorFlow's executors are given: after the optimizer
    (Grappler) and the placer, with the sends and receives that the partitioner has put between
    devices. The times are those of the profiler's events; on a GPU that is the launch of a kernel.

    Args:
        step: a Python function or a `tf.function`; it is traced anew, so it may create no variable.
        arguments: of it; with known shapes the bytes are known.
        repeats: steps that are profiled; the one of median length is drawn.
        warm: steps before these.

    Raises:
        InvalidInput: repeats is not positive. LabkitError: TensorFlow tells of no graph.
    """
    if repeats < 1:
        raise InvalidInput(f"repeats={repeats} is impossible: give at least 1")
    compiled = _anew(step)
    graph = executed_graph(compiled, *arguments)
    for _ in range(warm):
        compiled(*arguments)
    return timed(graph, compiled, arguments, repeats)


def executed_graph(
    step: tf.types.experimental.PolymorphicFunction, *arguments: tf.Tensor
) -> StepGraph:
    """The graph alone, without times; the function must not have run yet."""
    return joined(*executed_parts(step, *arguments))


def executed_parts(
    step: tf.types.experimental.PolymorphicFunction, *arguments: tf.Tensor
) -> tuple[Sequence[GraphDef], Any]:
    """What each device's executor is given, as TensorFlow's own protocol buffers, and its library.

    Raises:
        LabkitError: TensorFlow tells of no graph.
    """
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # of functions that ran since it was read last
        step(*arguments)
        context.context().executor.wait()
        told = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    if not told:
        raise LabkitError("TensorFlow tells of no graph: give a function that has not run yet")
    # Others are of what copies arguments; the step is by far the largest.
    largest = max(told, key=lambda each: sum(len(part.node) for part in each.partition_graphs))
    return largest.partition_graphs, largest.pre_optimization_graph.library


def timed(
    graph: StepGraph,
    step: tf.types.experimental.PolymorphicFunction,
    arguments: Sequence[tf.Tensor],
    repeats: int,
) -> StepGraph:
    """The graph with the times of so many steps."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for number in range(repeats):
            with tf.profiler.experimental.Trace(STEP, step_num=number, _r=1):
                # Read, or the next step would begin before this one has ended.
                tf.nest.map_structure(lambda each: each.numpy(), step(*arguments))
        tf.profiler.experimental.stop()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = list(_events(space))
    spans = sorted((start, stop) for name, start, stop in events if name == STEP)
    steps = [_within(events, span) for span in spans]
    if not steps:
        raise LabkitError("the profiler has no event of a step: it may run elsewhere already")
    longest = sorted(range(len(spans)), key=lambda at: spans[at][1] - spans[at][0])
    drawn = longest[len(longest) // 2]
    first, last = spans[drawn]
    found = [_with_times(operation, steps, drawn, first) for operation in graph.operations]
    return replace(graph, operations=tuple(found), seconds=last - first)


# By which oneDNN, on processors that have what it wants, names what it has a kernel for.
_MKL = re.compile("^_Mkl(Native)?")
# Of a step: when each operation ran, by its name.
Runs: TypeAlias = Mapping[str, list[tuple[float, float]]]


def _within(events: Sequence[tuple[str, float, float]], span: tuple[float, float]) -> Runs:
    found: dict[str, list[tuple[float, float]]] = {}
    for name, start, stop in events:
        if span[0] <= start < span[1]:
            found.setdefault(name, []).append((start, stop))
    return found


def _with_times(each: Operation, steps: Sequence[Runs], drawn: int, first: float) -> Operation:
    """In loops an operation runs often: it starts when it first does, and its seconds add up."""
    called = f"{each.name}:{each.op}"
    seconds = [sum(stop - start for start, stop in runs.get(called, [])) for runs in steps]
    times = steps[drawn].get(called)
    if not times:
        return replace(each, seconds=median(seconds))
    # Threads take turns at a loop, and the profiler lists its events thread by thread.
    start, stop = min(start for start, _ in times), max(stop for _, stop in times)
    return replace(each, seconds=median(seconds), start=start - first, stop=stop - first)


def _events(space: Any) -> Iterator[tuple[str, float, float]]:
    """Name, start and stop (s) of all that the profiler has seen on the host."""
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                start = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                node, colon, op = plane.event_metadata[event.metadata_id].name.rpartition(":")
                yield f"{node}{colon}{plain(op)}", start, start + 1e-12 * event.duration_ps


def plain(op: str) -> str:
    """An operation by TensorFlow's own name, also where a processor's library carries it out.

    >>> plain("_MklNativeFusedMatMul"), plain("_MklMatMul"), plain("Relu")
    ('_FusedMatMul', 'MatMul', 'Relu')
    """
    own = _MKL.sub("", op)
    return f"_{own}" if own != op and own.startswith("Fused") else own


def _anew(step: Callable[..., object]) -> tf.types.experimental.PolymorphicFunction:
    import tensorflow as tf

    return tf.function(getattr(step, "python_function", step))


def joined(parts: Sequence[GraphDef], library: Any) -> StepGraph:
    """The partitions as one graph: who receives reads what the sender sent."""
    import tensorflow as tf

    whole = tf.compat.v1.GraphDef(library=library)
    nodes = [node for part in parts for node in part.node]
    sent = {_key(node): node.input[0] for node in nodes if node.op == "_Send"}
    received = {node.name: sent[_key(node)] for node in nodes if node.op == "_Recv"}
    for node in nodes:
        if node.op in HIDDEN:
            continue
        kept = whole.node.add()
        kept.CopyFrom(node)
        kept.ClearField("device")  # shapes are asked of the graph, and no device need be there
        kept.input[:] = [_source(each, received) for each in node.input]
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(whole, name="")
    places = {node.name: _place(node.device) for node in nodes}
    operations = [
        Operation(
            operation.name,
            plain(operation.type),
            places[operation.name],
            sum(map(_bytes, operation.outputs)),
        )
        for operation in graph.get_operations()
    ]
    flows = [flow for operation in graph.get_operations() for flow in _flows(operation)]
    transfers = tuple(_transfers(nodes, graph))
    return StepGraph(tuple(operations), tuple(dict.fromkeys(flows)), transfers=transfers)


def _transfers(nodes: Sequence[NodeDef], graph: tf.Graph) -> Iterator[Transfer]:
    """Each receive with the send that has its key; the tensor is asked of the joined graph."""
    sends = {_key(node): node for node in nodes if node.op == "_Send"}
    for node in nodes:
        if node.op == "_Recv":
            (name, sender, receiver), send = _key(node), sends[_key(node)]
            made, _, port = send.input[0].partition(":")
            size = _bytes(graph.get_operation_by_name(made).outputs[int(port or 0)])
            between = (send.name, _place(sender), node.name, _place(receiver))
            yield Transfer(name, made, *between, size)


def _flows(each: tf.Operation) -> Iterator[Flow]:
    for tensor in each.inputs:
        if tensor.op.type != BACK:
            yield Flow(tensor.op.name, each.name, _bytes(tensor), output=tensor.value_index)
    for before in each.control_inputs:
        yield Flow(before.name, each.name, 0.0, control=True)


def _bytes(tensor: tf.Tensor) -> float:
    """Of a tensor of known shape; a handle carries none, whatever lies behind it."""
    if tensor.dtype.name in ("resource", "variant"):
        return 0.0
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype.name == "string":
        return math.nan
    return float(count * tensor.dtype.size)


def _source(name: str, received: Mapping[str, str]) -> str:
    """What a node reads, or waits for; across devices it is what was sent."""
    if name.startswith("^"):
        node = name[1:]
        return f"^{received[node].split(':')[0]}" if node in received else name
    return received.get(name.removesuffix(":0"), name)


def _key(node: NodeDef) -> tuple[str, str, str]:
    """What a send and its receive have in common."""
    named = ("tensor_name", "send_device", "recv_device")
    name, sender, receiver = (node.attr[each].s.decode() for each in named)
    return name, sender, receiver


def _place(device: str) -> str:
    """`/job:localhost/replica:0/task:0/device:CPU:1` as `CPU:1`"""
    return device.rpartition("device:")[2] or device
