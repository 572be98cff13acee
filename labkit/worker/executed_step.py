"""The graph that TensorFlow executed in a training step: operations, copies, and their times."""

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

    # The type aliases only name TensorFlow's protocol buffers, for which there are no type stubs.
    GraphDef: TypeAlias = Any
    NodeDef: TypeAlias = Any

STEP = "labkit step"  # The profiler event of one complete step has the name `STEP`.
# Operations with a type in `HIDDEN` send and receive a copy between devices; one edge replaces each
# pair.
HIDDEN = ("_Send", "_Recv")
# TensorFlow's operation `NextIteration` passes its output back to the start of a loop.
BACK = "NextIteration"


def step_graph(
    step: Callable[..., object], *arguments: tf.Tensor, repeats: int = 5, warm: int = 3
) -> StepGraph:
    """Run a training step; return the executed graph with the time of each operation.

    The returned graph joins the partitions that TensorFlow's executors receive, one partition per
    device. Three components of TensorFlow create the partitions of a graph. The components are the
    placer, the graph optimizer (Grappler) and the partitioner. The partitioner adds sends and
    receives between devices. Each time comes from a profiler event. On a GPU, the event is only the
    launch of a kernel.

    Args:
        step: A Python function or a `tf.function`. TensorFlow traces the step again, so the step
            must not create variables.
        arguments: Arguments of the step. The size of a tensor in bytes is known only if its shape
            is static.
        repeats: Number of profiled steps. The start and stop times come from the profiled step with
            the median duration.
        warm: Number of warmup steps before profiling starts.

    Raises:
        InvalidInput: If `repeats` is not positive.
        LabkitError: If TensorFlow reports no graph.
    """
    if repeats < 1:
        raise InvalidInput(f"repeats={repeats} is impossible; give at least 1")
    compiled = _retrace(step)
    graph = executed_graph(compiled, *arguments)
    for _ in range(warm):
        compiled(*arguments)
    return timed(graph, compiled, arguments, repeats)


def executed_graph(
    step: tf.types.experimental.PolymorphicFunction, *arguments: tf.Tensor
) -> StepGraph:
    """Run a step; return its executed graph without times. `step` must not have run before."""
    return join_partitions(*executed_partitions(step, *arguments))


def executed_partitions(
    step: tf.types.experimental.PolymorphicFunction, *arguments: tf.Tensor
) -> tuple[Sequence[GraphDef], Any]:
    """Return the executed graph of each device, and the function library, as protocol buffers.

    Raises:
        LabkitError: If TensorFlow reports no graph.
    """
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    try:
        # The first export discards metadata of functions that ran earlier.
        context.export_run_metadata()
        step(*arguments)
        context.context().executor.wait()
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    if not graphs:
        raise LabkitError("TensorFlow reports no graph; give a function that has not run yet")
    # TensorFlow also reports small graphs that only copy arguments. The largest of the reported
    # graphs belongs to the training step.
    largest = max(graphs, key=lambda graph: sum(len(part.node) for part in graph.partition_graphs))
    return largest.partition_graphs, largest.pre_optimization_graph.library


def timed(
    graph: StepGraph,
    step: tf.types.experimental.PolymorphicFunction,
    arguments: Sequence[tf.Tensor],
    repeats: int,
) -> StepGraph:
    """Profile `repeats` steps, and return the graph with the times of its operations."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        for number in range(repeats):
            with tf.profiler.experimental.Trace(STEP, step_num=number, _r=1):
                # Reading the result of a step makes the step finish before the next one starts.
                tf.nest.map_structure(lambda tensor: tensor.numpy(), step(*arguments))
        tf.profiler.experimental.stop()
        (path,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
    events = list(_events(space))
    spans = sorted((start, stop) for name, start, stop in events if name == STEP)
    steps = [_within(events, span) for span in spans]
    if not steps:
        raise LabkitError("the profiler recorded no step: another profiler session may be active")
    longest = sorted(range(len(spans)), key=lambda at: spans[at][1] - spans[at][0])
    drawn = longest[len(longest) // 2]
    first, last = spans[drawn]
    operations = [_with_times(operation, steps, drawn, first) for operation in graph.operations]
    return replace(graph, operations=tuple(operations), seconds=last - first)


# Names of operations that run kernels of the oneDNN library have the prefix `_Mkl`.
_ONEDNN_PREFIX = re.compile("^_Mkl(Native)?")
# For each operation name, `Runs` holds the start and stop in s of each execution in one step.
Runs: TypeAlias = Mapping[str, list[tuple[float, float]]]


def _within(events: Sequence[tuple[str, float, float]], span: tuple[float, float]) -> Runs:
    runs: dict[str, list[tuple[float, float]]] = {}
    for name, start, stop in events:
        if span[0] <= start < span[1]:
            runs.setdefault(name, []).append((start, stop))
    return runs


def _with_times(operation: Operation, steps: Sequence[Runs], drawn: int, first: float) -> Operation:
    """Return an operation with its times; the seconds of a loop add up all its iterations."""
    event_name = f"{operation.name}:{operation.op}"
    seconds = [sum(stop - start for start, stop in runs.get(event_name, [])) for runs in steps]
    times = steps[drawn].get(event_name)
    if not times:
        return replace(operation, seconds=median(seconds))
    # Several threads may execute the same loop, and the profiler lists their events by thread, not
    # by time.
    start, stop = min(start for start, _ in times), max(stop for _, stop in times)
    return replace(operation, seconds=median(seconds), start=start - first, stop=stop - first)


def _events(space: Any) -> Iterator[tuple[str, float, float]]:
    """Yield the name, start and stop (s) of each profiler event on the host."""
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                start = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                node, colon, op = plane.event_metadata[event.metadata_id].name.rpartition(":")
                yield (
                    f"{node}{colon}{tensorflow_name(op)}",
                    start,
                    start + 1e-12 * event.duration_ps,
                )


def tensorflow_name(op: str) -> str:
    """Return TensorFlow's name for an operation; the prefix of oneDNN is removed.

    >>> [tensorflow_name(op) for op in ("_MklNativeFusedMatMul", "_MklMatMul", "Relu")]
    ['_FusedMatMul', 'MatMul', 'Relu']
    """
    stripped = _ONEDNN_PREFIX.sub("", op)
    return f"_{stripped}" if stripped != op and stripped.startswith("Fused") else stripped


def _retrace(step: Callable[..., object]) -> tf.types.experimental.PolymorphicFunction:
    import tensorflow as tf

    return tf.function(getattr(step, "python_function", step))


def join_partitions(parts: Sequence[GraphDef], library: Any) -> StepGraph:
    """Join the graphs of all devices into one; one edge replaces each send and its receive."""
    import tensorflow as tf

    whole = tf.compat.v1.GraphDef(library=library)
    nodes = [node for part in parts for node in part.node]
    sent = {_key(node): node.input[0] for node in nodes if node.op == "_Send"}
    received = {node.name: sent[_key(node)] for node in nodes if node.op == "_Recv"}
    for node in nodes:
        if node.op in HIDDEN:
            continue
        copy = whole.node.add()
        copy.CopyFrom(node)
        # The copy names no device, because the operation's device may not exist in the current
        # process.
        copy.ClearField("device")
        copy.input[:] = [_source(name, received) for name in node.input]
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(whole, name="")
    places = {node.name: _place(node.device) for node in nodes}
    operations = [
        Operation(
            operation.name,
            tensorflow_name(operation.type),
            places[operation.name],
            sum(map(_bytes, operation.outputs)),
        )
        for operation in graph.get_operations()
    ]
    flows = [flow for operation in graph.get_operations() for flow in _flows(operation)]
    transfers = tuple(_transfers(nodes, graph))
    return StepGraph(tuple(operations), tuple(dict.fromkeys(flows)), transfers=transfers)


def _transfers(nodes: Sequence[NodeDef], graph: tf.Graph) -> Iterator[Transfer]:
    """Yield a transfer for each pair of send and receive, with the tensor's size from `graph`."""
    sends = {_key(node): node for node in nodes if node.op == "_Send"}
    for node in nodes:
        if node.op == "_Recv":
            (name, sender, receiver), send = _key(node), sends[_key(node)]
            source, _, port = send.input[0].partition(":")
            size = _bytes(graph.get_operation_by_name(source).outputs[int(port or 0)])
            between = (send.name, _place(sender), node.name, _place(receiver))
            yield Transfer(name, source, *between, size)


def _flows(operation: tf.Operation) -> Iterator[Flow]:
    for tensor in operation.inputs:
        if tensor.op.type != BACK:
            yield Flow(tensor.op.name, operation.name, _bytes(tensor), output=tensor.value_index)
    for before in operation.control_inputs:
        yield Flow(before.name, operation.name, 0.0, control=True)


def _bytes(tensor: tf.Tensor) -> float:
    """Return a tensor's bytes: 0 for a resource handle, NaN for text or an unknown shape."""
    if tensor.dtype.name in ("resource", "variant"):
        return 0.0
    count = tensor.shape.num_elements()
    if count is None or tensor.dtype.name == "string":
        return math.nan
    return float(count * tensor.dtype.size)


def _source(name: str, received: Mapping[str, str]) -> str:
    """Return the name of a node's input; for a received tensor, return the name at its sender."""
    if name.startswith("^"):
        node = name[1:]
        return f"^{received[node].split(':')[0]}" if node in received else name
    return received.get(name.removesuffix(":0"), name)


def _key(node: NodeDef) -> tuple[str, str, str]:
    """Return the key (tensor, sender, receiver) that a send shares with its receive."""
    attributes = ("tensor_name", "send_device", "recv_device")
    name, sender, receiver = (node.attr[attribute].s.decode() for attribute in attributes)
    return name, sender, receiver


def _place(device: str) -> str:
    """Return the short name of a device: `CPU:1` for `/job:localhost/…/device:CPU:1`."""
    return device.rpartition("device:")[2] or device
