"""The graph of a training step that TensorFlow executes on several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.common.errors import LabkitError
from labkit.records.step_graph import StepGraph
from labkit.simulate.placement import SIGNAL, GraphTask, Need, PlacementPlan, TaskGraph
from labkit.worker.devices import DeviceRequest
from labkit.worker.executed_step import executed_partitions, join_partitions, timed

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf


RATE = 0.05  # The constant RATE is the learning rate of gradient descent.
FIRST = "/CPU:0"  # The CPU is requested explicitly, because TensorFlow would choose a GPU.


@dataclass(frozen=True)
class TowerStep:
    """A gradient descent step (a function that returns the loss), its variables, and a batch."""

    run: Callable[..., tf.Tensor]
    variables: Sequence[tf.Variable]
    batch: tuple[tf.Tensor, tf.Tensor]


def towers(request: DeviceRequest, scopes: Sequence[str] = ()) -> TowerStep:
    """Return a training step of the tower model; tower i requests the device `scopes[i]`.

    If there are more towers than entries in `scopes`, the entries are used repeatedly. If `scopes`
    is given, TensorFlow's placer chooses devices for all operations outside the towers. If `scopes`
    is empty, all operations are on the first device.

    The model is \\(\\text{softmax}(W [h_1, …, h_k] + b)\\), where \\(h_i\\) is the output of tower
    i. A tower is a chain of dense layers with ReLU; all towers read the same batch.
    """
    import tensorflow as tf

    def on(tower: int) -> AbstractContextManager[object]:
        return tf.device(f"/{scopes[tower % len(scopes)]}") if scopes else nullcontext()

    with tf.device(FIRST):
        draw = tf.random.Generator.from_seed(request.seed)
        layers = []
        for number, width in enumerate(request.widths):
            with on(number):
                layers.append(_tower(request, width, draw, f"tower{number}"))
        head = _dense(sum(request.widths), request.classes, draw, "head")
        samples = draw.normal((request.batch, request.features))
        labels = draw.uniform((request.batch,), maxval=request.classes, dtype=tf.int32)
    variables = [variable for tower in layers for layer in tower for variable in layer] + head

    def affine(x: tf.Tensor, layer: Sequence[tf.Variable]) -> tf.Tensor:
        return tf.nn.bias_add(tf.matmul(x, layer[0]), layer[1])  # (batch, outputs)

    def loss_of(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        outputs = []
        for number, tower in enumerate(layers):
            with on(number), tf.name_scope(f"tower{number}"):
                h = x
                for layer in tower:
                    h = tf.nn.relu(affine(h, layer))
                outputs.append(h)
        with tf.name_scope("head"):
            scores = affine(tf.concat(outputs, axis=1), head)  # (batch, classes)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=scores)
            return tf.reduce_mean(losses)

    def descend(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(x, y)
        gradients = tape.gradient(loss, variables)
        with tf.name_scope("descent"):
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(RATE * gradient)
        return loss

    def run(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with nullcontext() if scopes else tf.device(FIRST):
            return descend(x, y)

    return TowerStep(run, variables, (samples, labels))


def _tower(
    request: DeviceRequest, width: int, draw: tf.random.Generator, name: str
) -> list[list[tf.Variable]]:
    """Return the kernel and bias of each layer of one tower."""
    inputs = [request.features, *[width] * (request.depth - 1)]
    return [_dense(width_in, width, draw, f"{name}_{at}") for at, width_in in enumerate(inputs)]


def _dense(inputs: int, outputs: int, draw: tf.random.Generator, name: str) -> list[tf.Variable]:
    import tensorflow as tf

    start = draw.normal((inputs, outputs), stddev=(2 / inputs) ** 0.5)
    kernel = tf.Variable(start, name=f"{name}_kernel")
    return [kernel, tf.Variable(tf.zeros((outputs,)), name=f"{name}_bias")]


# Graph nodes with a type in `PLAIN` are not tasks. Each device that reads a constant gets its own
# copy. A return node only passes on another node's value.
PLAIN = ("Const", "_Retval")
HOST = 0  # The device with the number `HOST` holds the batch and receives the loss.


@dataclass(frozen=True)
class Traced:
    """A step's graph after TensorFlow's optimizer, with all data to run it on other devices.

    Attributes:
        nodes: TensorFlow's node definitions (NodeDef).
        graph: The same graph as a `StepGraph`.
        values: Values of the variables when the graph was traced, in the order of the arguments.
        captured: Mapping from names of arguments to their indices; inputs come first, then
            variables.
        inputs: Number of arguments that are inputs; all other arguments are variables.
    """

    nodes: tuple[Any, ...]
    graph: StepGraph
    values: tuple[np.ndarray, ...]
    captured: Mapping[str, int]
    inputs: int

    def tasks(self, graph: StepGraph | None = None) -> TaskGraph:
        """Return the step as a task graph, with times from `graph` (default: from `self.graph`)."""
        operations = (graph or self.graph).operations
        variables = {name for name, number in self.captured.items() if number >= self.inputs}
        operations_by_name = {
            o.name: o for o in operations if o.op not in PLAIN and o.name not in variables
        }
        flows = self.graph.flows
        groups = {f.target: f.source for f in flows if f.source in variables}
        returned = {
            f.source
            for f in flows
            if f.target not in operations_by_name and f.target not in variables
        }
        tasks = [
            GraphTask(
                name=name,
                seconds=operation.seconds,
                bytes=operation.bytes,
                group=groups.get(name, ""),
                device=HOST if operation.op == "_Arg" or name in returned else None,
                kind=operation.op,
            )
            for name, operation in operations_by_name.items()
        ]
        needs = [
            Need(flow.source, flow.target, flow.bytes, SIGNAL if flow.control else flow.output)
            for flow in flows
            if flow.source in operations_by_name and flow.target in operations_by_name
        ]
        return TaskGraph(tuple(tasks), tuple(needs))

    def placed(self, plan: PlacementPlan) -> Callable[..., tf.Tensor]:
        """Return the step as a function that follows the devices and task order of a plan.

        Control edges enforce the order of the tasks on a device. A control edge leads from each
        task to the next task of the same device. Control edges make a logical device run one task
        at a time, although the processor could run more. The function has new variables with the
        values at the time of tracing. The plan assigns the new variables to devices.
        """
        import tensorflow as tf
        from tensorflow.python.framework import ops

        variables = self._variables(plan)
        definition = self._definition(plan)
        (end,) = (node for node in self.nodes if node.op == "_Retval")
        specs = [_spec(self.nodes, name) for name in self._names[: self.inputs]]

        def body(*inputs: tf.Tensor) -> tf.Tensor:
            capture = ops.get_default_graph().capture
            arguments = [*inputs, *(capture(variable.handle) for variable in variables)]
            mapped = {f"{name}:0": arguments[at] for name, at in self.captured.items()}
            loss_name = end.input[0] if ":" in end.input[0] else f"{end.input[0]}:0"
            (loss,) = tf.graph_util.import_graph_def(
                definition, input_map=mapped, return_elements=[loss_name], name=""
            )
            return loss

        # The code does not use `tf.function`, because `tf.function` would add more control edges to
        # the graph.
        wrapped: Callable[..., tf.Tensor] = tf.compat.v1.wrap_function(body, specs)
        return wrapped

    def timed(self, plan: PlacementPlan, batch: tuple[tf.Tensor, ...], repeats: int) -> StepGraph:
        """Return the graph with measured times of its operations on the devices of a plan."""
        step = self.placed(plan)
        for _ in range(3):
            step(*batch)
        return timed(self.graph, step, batch, repeats)

    @property
    def _names(self) -> list[str]:
        return sorted(self.captured, key=lambda name: self.captured[name])

    def _variables(self, plan: PlacementPlan) -> list[tf.Variable]:
        import tensorflow as tf

        groups = {t.group: plan.devices[t.name] for t in plan.graph.tasks if t.group}
        variables = []
        for number, value in enumerate(self.values):
            name = self._names[self.inputs + number]
            with tf.device(f"/{plan.machine.devices[groups[name]]}"):
                variables.append(tf.Variable(value))
        return variables

    def _definition(self, plan: PlacementPlan) -> Any:
        """Return the nodes on the devices of a plan; control edges enforce the plan's order."""
        import tensorflow as tf

        device_names = [f"/job:localhost/replica:0/task:0/device:{d}" for d in plan.machine.devices]
        constants = {node.name for node in self.nodes if node.op == "Const"}
        computed = [node for node in self.nodes if node.op not in (*PLAIN, "_Arg")]
        computed_names = {node.name for node in computed}
        orders = [
            [n for n in plan.on(at) if n in computed_names] for at in range(len(device_names))
        ]
        last = {after: before for order in orders for before, after in pairwise(order)}
        definition = tf.compat.v1.GraphDef()
        copied: set[tuple[str, int]] = set()
        for node in computed:
            device = plan.devices[node.name]
            copy = definition.node.add()
            copy.CopyFrom(node)
            copy.device = device_names[device]
            base_names = [_node_name(name) for name in node.input]
            copy.input[:] = [
                name.replace(base, _constant_copy_name(base, device), 1)
                if base in constants
                else name
                for name, base in zip(node.input, base_names, strict=True)
            ]
            copied |= {(base, device) for base in base_names if base in constants}
            if node.name in last:
                copy.input.append(f"^{last[node.name]}")
        for node in self.nodes:
            for device, place in enumerate(device_names):
                if (node.name, device) in copied:
                    copy = definition.node.add()
                    copy.CopyFrom(node)
                    copy.name, copy.device = _constant_copy_name(node.name, device), place
                    del copy.input[:]  # A constant needs no control inputs.
        return definition


def trace(step: TowerStep) -> Traced:
    """Run a training step on one device; return the graph that TensorFlow has optimized.

    Raises:
        LabkitError: If the step ran on several devices, or returns more than one tensor.
    """
    import tensorflow as tf

    values = tuple(variable.numpy() for variable in step.variables)
    compiled = tf.function(step.run)
    parts, library = executed_partitions(compiled, *step.batch)
    if len(parts) != 1:
        raise LabkitError(
            f"the step ran on {len(parts)} devices; trace the step without device scopes"
        )
    nodes = tuple(parts[0].node)
    if sum(node.op == "_Retval" for node in nodes) != 1:
        raise LabkitError("the step returns several tensors; let the step return only its loss")
    captured = {node.name: node.attr["index"].i for node in nodes if node.op == "_Arg"}
    inputs = len(step.batch)
    handles = compiled.get_concrete_function(*step.batch).captured_inputs
    by_handle = {id(variable.handle): number for number, variable in enumerate(step.variables)}
    ordered = tuple(values[by_handle[id(handle)]] for handle in handles)
    return Traced(nodes, join_partitions(parts, library), ordered, captured, inputs)


def _spec(nodes: tuple[Any, ...], name: str) -> tf.TensorSpec:
    import tensorflow as tf

    (node,) = (node for node in nodes if node.name == name)
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    return tf.TensorSpec(shape, tf.dtypes.as_dtype(node.attr["T"].type))


def _node_name(name: str) -> str:
    """Return the name of an input's node: both `^node` and `node:1` give `node`."""
    return name.removeprefix("^").partition(":")[0]


def _constant_copy_name(name: str, device: int) -> str:
    return f"{name}/on_{device}"
