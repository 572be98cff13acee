"""A traced step as tasks, and the same step again on the devices of a plan, in its order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from labkit.common.errors import LabkitError
from labkit.records.step_graph import StepGraph
from labkit.simulate.placement import SIGNAL, Need, Plan, Task, TaskGraph
from labkit.worker.devices.towers import Step
from labkit.worker.executed_step import executed_parts, joined, timed

if TYPE_CHECKING:
    import numpy as np
    import tensorflow as tf

# What neither computes nor is copied: a constant is where it is read, a handle where its variable
# is, and what is returned has been computed by another node.
PLAIN = ("Const", "_Retval")
HOST = 0  # the number of the device that has the batch and is told the loss


@dataclass(frozen=True)
class Traced:
    """What TensorFlow's optimizer left of a step, and what is needed to run it elsewhere.

    Attributes:
        nodes: TensorFlow's own records of them.
        graph: the same, to be read.
        values: of the variables when the step was traced, in the order of its arguments.
        captured: what each argument of the graph is, by name: an input or a variable, by number.
        inputs: how many of the arguments are inputs.
    """

    nodes: tuple[Any, ...]
    graph: StepGraph
    values: tuple[np.ndarray, ...]
    captured: Mapping[str, int]
    inputs: int

    def tasks(self, graph: StepGraph | None = None) -> TaskGraph:
        """What is to be placed; with the times of this graph, as `timed` has measured them."""
        operations = (graph or self.graph).operations
        variables = {name for name, number in self.captured.items() if number >= self.inputs}
        kept = {o.name: o for o in operations if o.op not in PLAIN and o.name not in variables}
        flows = self.graph.flows
        groups = {f.target: f.source for f in flows if f.source in variables}
        returned = {f.source for f in flows if f.target not in kept and f.target not in variables}
        tasks = [
            Task(
                name=name,
                seconds=each.seconds,
                bytes=each.bytes,
                group=groups.get(name, ""),
                device=HOST if each.op == "_Arg" or name in returned else None,
                kind=each.op,
            )
            for name, each in kept.items()
        ]
        needs = [
            Need(flow.source, flow.target, flow.bytes, SIGNAL if flow.control else flow.output)
            for flow in flows
            if flow.source in kept and flow.target in kept
        ]
        return TaskGraph(tuple(tasks), tuple(needs))

    def placed(self, plan: Plan) -> Callable[..., tf.Tensor]:
        """The step as a function whose operations are where the plan has them, in its order.

        The order is kept by control edges from each task of a device to its next one, so a logical
        device does one thing at a time, though the processor behind it could do more. Variables are
        new, on their group's device, with the values that they had when the step was traced.
        """
        import tensorflow as tf
        from tensorflow.python.framework import ops

        variables = self._variables(plan)
        definition = self._definition(plan)
        (end,) = (node for node in self.nodes if node.op == "_Retval")
        specs = [_spec(self.nodes, name) for name in self._names[: self.inputs]]

        def body(*given: tf.Tensor) -> tf.Tensor:
            capture = ops.get_default_graph().capture
            arguments = [*given, *(capture(variable.handle) for variable in variables)]
            mapped = {f"{name}:0": arguments[at] for name, at in self.captured.items()}
            wanted = end.input[0] if ":" in end.input[0] else f"{end.input[0]}:0"
            (loss,) = tf.graph_util.import_graph_def(
                definition, input_map=mapped, return_elements=[wanted], name=""
            )
            return loss

        # Not `tf.function`, which would add control edges of its own.
        wrapped: Callable[..., tf.Tensor] = tf.compat.v1.wrap_function(body, specs)
        return wrapped

    def timed(self, plan: Plan, batch: tuple[tf.Tensor, ...], repeats: int) -> StepGraph:
        """The graph with the times of its operations when the plan is carried out."""
        step = self.placed(plan)
        for _ in range(3):
            step(*batch)
        return timed(self.graph, step, batch, repeats)

    @property
    def _names(self) -> list[str]:
        return sorted(self.captured, key=lambda name: self.captured[name])

    def _variables(self, plan: Plan) -> list[tf.Variable]:
        import tensorflow as tf

        groups = {t.group: plan.devices[t.name] for t in plan.graph.tasks if t.group}
        made = []
        for number, value in enumerate(self.values):
            name = self._names[self.inputs + number]
            with tf.device(f"/{plan.machine.devices[groups[name]]}"):
                made.append(tf.Variable(value))
        return made

    def _definition(self, plan: Plan) -> Any:
        """The nodes with the devices of the plan, and its order as control edges."""
        import tensorflow as tf

        called = [f"/job:localhost/replica:0/task:0/device:{d}" for d in plan.machine.devices]
        constants = {node.name for node in self.nodes if node.op == "Const"}
        computed = [node for node in self.nodes if node.op not in (*PLAIN, "_Arg")]
        own = {node.name for node in computed}
        orders = [[n for n in plan.on(at) if n in own] for at in range(len(called))]
        last = {after: before for order in orders for before, after in pairwise(order)}
        definition = tf.compat.v1.GraphDef()
        copied: set[tuple[str, int]] = set()
        for node in computed:
            device = plan.devices[node.name]
            made = definition.node.add()
            made.CopyFrom(node)
            made.device = called[device]
            read = [_base(each) for each in node.input]
            made.input[:] = [
                each.replace(base, _copy(base, device), 1) if base in constants else each
                for each, base in zip(node.input, read, strict=True)
            ]
            copied |= {(base, device) for base in read if base in constants}
            if node.name in last:
                made.input.append(f"^{last[node.name]}")
        for node in self.nodes:
            for device, place in enumerate(called):
                if (node.name, device) in copied:
                    made = definition.node.add()
                    made.CopyFrom(node)
                    made.name, made.device = _copy(node.name, device), place
                    del made.input[:]  # what a constant waits for orders nothing
        return definition


def trace(step: Step) -> Traced:
    """Run a step on one device, and keep what TensorFlow's optimizer made of it.

    Raises:
        LabkitError: it ran on several, or returns more than one tensor.
    """
    import tensorflow as tf

    values = tuple(variable.numpy() for variable in step.variables)
    compiled = tf.function(step.run)
    parts, library = executed_parts(compiled, *step.batch)
    if len(parts) != 1:
        raise LabkitError(f"the step ran on {len(parts)} devices: trace it without device scopes")
    nodes = tuple(parts[0].node)
    if sum(node.op == "_Retval" for node in nodes) != 1:
        raise LabkitError("the step returns several tensors: let it return its loss alone")
    captured = {node.name: node.attr["index"].i for node in nodes if node.op == "_Arg"}
    inputs = len(step.batch)
    handles = compiled.get_concrete_function(*step.batch).captured_inputs
    by_handle = {id(variable.handle): number for number, variable in enumerate(step.variables)}
    ordered = tuple(values[by_handle[id(handle)]] for handle in handles)
    return Traced(nodes, joined(parts, library), ordered, captured, inputs)


def _spec(nodes: tuple[Any, ...], name: str) -> tf.TensorSpec:
    import tensorflow as tf

    (node,) = (node for node in nodes if node.name == name)
    shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
    return tf.TensorSpec(shape, tf.dtypes.as_dtype(node.attr["T"].type))


def _base(name: str) -> str:
    """`^node` and `node:1` as `node`"""
    return name.removeprefix("^").partition(":")[0]


def _copy(name: str, device: int) -> str:
    return f"{name}/on_{device}"
