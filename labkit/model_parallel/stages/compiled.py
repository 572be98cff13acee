"""A computation and its gradients, traced in one graph and compiled as separate functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import keras
import tensorflow as tf

# The type `Specs` is a nested structure of `tf.TensorSpec` objects, with None for missing values.
Specs: TypeAlias = "tf.TensorSpec | Sequence[Specs] | None"


class TracedGraph:
    """A traced TensorFlow function as a graph, in which operations are found by name.

    Args:
        trace: Function that creates the operations.
        specs: Shapes and dtypes of the arguments of `trace`; None for each missing argument.

    Attributes:
        inputs: Names of the tensors that represent the arguments.
        acting: Names of stateful operations, which TensorFlow runs in the order of their creation.
    """

    def __init__(self, trace: Callable[..., None], specs: Sequence[Specs]) -> None:
        # The code stores the traced function to keep the function alive. The traced function owns
        # the Python functions that its operations call. Autograph is disabled for the function
        # `trace`, because Keras also traces models without autograph.
        traced = tf.function(trace, autograph=False)
        self._traced = traced.get_concrete_function(*specs)
        graph, captured = self._traced.graph, self._traced.captured_inputs
        names = [tensor.name for tensor in self._traced.inputs]
        count = len(names) - len(captured)
        self.inputs = names[:count]
        self._captured = dict(zip(names[count:], captured, strict=True))
        self._ends = {operation(name) for name in names}
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self.acting = {op.name for op in graph.get_operations() if op.op_def.is_stateful}

    def before(self, names: Iterable[str], outside: Collection[str] = ()) -> set[str]:
        """Return all operations that are necessary to compute the operations `names`."""
        ancestors: set[str] = set()
        pending = [operation(name) for name in names]
        while pending:
            name = pending.pop()
            if name not in ancestors and name not in self._ends and name not in outside:
                ancestors.add(name)
                pending += map(operation, self._nodes[name].input)
        return ancestors

    def feeds(self, operations: Collection[str], fetches: Iterable[str]) -> list[str]:
        """Return the input tensors from which `operations` compute the tensors `fetches`."""
        read = {
            _tensor(name)
            for op in operations
            for name in self._nodes[op].input
            if not name.startswith("^")
        }
        outside = {name for name in read.union(fetches) if operation(name) not in operations}
        return sorted(name for name in outside if not self._is_constant(name))

    def cut(self, operations: Collection[str], fetches: Sequence[str]) -> TracedSegment:
        """Return a function that runs `operations` and returns the tensors `fetches`.

        The extracted function contains only those control dependencies that connect its own
        operations. The operations of two functions may need a certain order. The caller must then
        call the functions in that order.
        """
        read = [name for op in operations for name in self._nodes[op].input]
        # Each function contains copies of its constants. A caller would have to store constants
        # that are passed as arguments.
        makers = set(map(operation, [*read, *fetches]))
        inside = {*operations, *(name for name in makers if self._nodes[name].op == "Const")}
        nodes = [
            _without_outside_controls(node, inside)
            for node in self._definition.node
            if node.name in inside
        ]
        part = tf.compat.v1.GraphDef(
            node=nodes, library=self._definition.library, versions=self._definition.versions
        )
        specs = {name: self._spec(name) for name in self.feeds(inside, fetches)}
        return TracedSegment(part, specs, self._captured, list(dict.fromkeys(fetches)))

    def _is_constant(self, name: str) -> bool:
        return name in self._captured or self._nodes[operation(name)].op == "Const"

    def _spec(self, name: str) -> tf.TensorSpec:
        tensor = self._traced.graph.get_tensor_by_name(name)
        return tf.TensorSpec(tensor.shape, tensor.dtype)


class TracedSegment:
    """A compiled function whose tensors have the same names as in its `TracedGraph`.

    Args:
        part: Operations of the function, as a `GraphDef`.
        specs: Dict from name of input tensor to shape and dtype.
        captured: Dict from tensor name to variable, for variables outside the traced graph. The
            compiled function may read only some of the captured variables.
        fetches: Names of the output tensors, which may include input tensors.
    """

    def __init__(
        self,
        part: tf.compat.v1.GraphDef,
        specs: Mapping[str, tf.TensorSpec],
        captured: Mapping[str, tf.Tensor],
        fetches: list[str],
    ) -> None:
        self.part, self.feeds = part, list(specs)
        self._fetches = [name for name in fetches if name not in specs]
        read = {_tensor(name) for node in part.node for name in node.input}

        def run(*values: tf.Tensor) -> list[tf.Tensor]:
            inputs = dict(zip(self.feeds, values, strict=True))
            replacements = {name: value for name, value in inputs.items() if name in read}
            for name in read.intersection(captured):
                replacements[name] = tf.compat.v1.get_default_graph().capture(captured[name])
            outputs = tf.import_graph_def(part, replacements, self._fetches, name="part")
            self._types = [tensor.dtype for tensor in outputs]
            # TensorFlow's operation `StatefulPartitionedCall` cannot return int32 tensors such as
            # shapes, so int32 outputs are cast to int64.
            return [tf.cast(x, tf.int64) if x.dtype == tf.int32 else x for x in outputs]

        function = tf.function(run, autograph=False)
        self._function = function.get_concrete_function(*specs.values())
        self._returned = [tensor.dtype for tensor in self._function.outputs]

    def __call__(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Run the function on a dict from name to tensor; return a dict of the output tensors."""
        arguments = [values[name] for name in self.feeds]
        # A direct call of the concrete function would give the same result. A direct call takes
        # longer, because it also inspects the arguments.
        outputs = tf.raw_ops.StatefulPartitionedCall(
            args=arguments + self._function.captured_inputs, Tout=self._returned, f=self._function
        )
        results = zip(self._fetches, outputs, self._types, strict=True)
        return {name: tf.cast(x, to) if to == tf.int32 else x for name, x, to in results}


def operation(name: str) -> str:
    """Return the operation name in a tensor name (`op:0`) or a control dependency (`^op`)."""
    return name.removeprefix("^").partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _without_outside_controls(
    node: tf.compat.v1.NodeDef, inside: Collection[str]
) -> tf.compat.v1.NodeDef:
    """Return a copy of a node that has control dependencies only on operations in `inside`."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    # The node attribute `_class` requests placement on the device of other operations. Some
    # operations are missing in the extracted function.
    copy.attr.pop("_class", None)
    del copy.input[:]
    copy.input.extend(
        name for name in node.input if not name.startswith("^") or operation(name) in inside
    )
    return copy


# The type `Values` maps the name of a tensor in the graph to the tensor.
Values: TypeAlias = dict[str, tf.Tensor]
# The type `Computed` contains results, tensors with given gradients, and a scalar objective. A
# result is a tensor or None.
Computed: TypeAlias = tuple[list[tf.Tensor | None], list[tf.Tensor], tf.Tensor]
Compute: TypeAlias = Callable[..., Computed]


class Compiled:
    """Compiled forward and backward passes; the backward pass may run as two functions.

        forward             arguments    ->  results, saved
        backward            saved, seeds ->  dx, dw
        backward_input      saved, seeds ->  dx, rest
        backward_weight     rest         ->  dw

    The backward functions repeat no computation of `forward`, and `backward_weight` repeats no
    computation of `backward_input`. `backward_input` computes all intermediate gradients that lead
    to the inputs, or to at least two weights. `backward_weight` computes the weight gradients from
    the remaining matrix products.

    An operation that computes several gradients, such as the backward loop of a recurrent layer,
    belongs to `backward_input`. Operations with side effects, such as calls to Python functions or
    messages, also belong to `backward_input`. Operations with side effects run once, in trace
    order, as in the forward pass.

    Args:
        compute: Function that returns two lists and a scalar objective. The first list contains
            results, each a tensor or None. The second list contains the tensors whose gradients are
            the seeds.
        specs: Shapes and dtypes of the arguments, as one nested structure per argument, with None
            for missing values.
        inputs: Function that selects, from the arguments, the tensors whose gradients are computed.
        variables: The weights whose gradients are computed.
    """

    def __init__(
        self,
        compute: Compute,
        specs: Sequence[Specs],
        inputs: Callable[..., list[tf.Tensor]],
        variables: Sequence[keras.Variable],
    ) -> None:
        # The list `forward_names` contains the names of operations that are traced before the
        # backward pass.
        forward_names: list[str] = []

        def trace(*arguments: tf.Tensor | None) -> None:
            watched, weights = inputs(*arguments), [variable.value for variable in variables]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                results, ends, objective = compute(*arguments)
            forward_names[:] = [op.name for op in tf.compat.v1.get_default_graph().get_operations()]
            # In a pipeline, the gradients from the next stage arrive only after the forward pass.
            # Placeholders represent the gradients from the next stage. With placeholders, the
            # forward and backward pass form one graph and share tensors.
            seeds = [tf.compat.v1.placeholder(end.dtype, end.shape) for end in ends]
            initial = [tf.ones_like(objective), *seeds]
            dx, dw = tape.gradient([objective, *ends], [watched, weights], initial)
            self._results = [None if result is None else result.name for result in results]
            self._seeds = _names(seeds)
            self._dx, self._dw = _names(dense(dx, watched)), _names(dense(dw, weights))

        self._graph = graph = TracedGraph(trace, specs)
        # The list `forward_names` contains the operations that are traced before the backward pass.
        # Operations in `forward_names` belong to the forward pass, even if their results are
        # unread. An operation with an unread result may still update statistics.
        forward = graph.before(forward_names)
        ends, self._outside = [*self._dx, *self._dw], {*forward, *map(operation, self._seeds)}
        self._backward = graph.before([*ends, *graph.acting], self._outside)
        self._saved = set(graph.feeds(self._backward, ends)).difference(self._seeds)
        results = [name for name in self._results if name is not None]
        self.ahead = graph.cut(forward, [*results, *sorted(self._saved)])

    def forward(self, arguments: Iterable[tf.Tensor]) -> tuple[list[tf.Tensor | None], Values]:
        """Return the results, and the tensors that the backward pass reads, including weights.

        Args:
            arguments: The tensors of all arguments, flattened, in order.
        """
        values: Values = dict(zip(self._graph.inputs, arguments, strict=True))
        values |= self.ahead(values)
        results = [None if name is None else values[name] for name in self._results]
        return results, {name: values[name] for name in self._saved}

    def backward(
        self, saved: Values, seeds: Iterable[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the gradients with respect to the inputs and to the weights."""
        values = self._seeded(saved, seeds)
        values |= self.full_backward(values)
        return [values[name] for name in self._dx], [values[name] for name in self._dw]

    def backward_input(
        self, saved: Values, seeds: Iterable[tf.Tensor]
    ) -> tuple[list[tf.Tensor], Values]:
        """Return the gradients of the inputs, and the arguments of `backward_weight`."""
        first, second = self.parts
        values = self._seeded(saved, seeds)
        values |= first(values)
        rest_values = {name: values[name] for name in second.feeds}
        return [values[name] for name in self._dx], rest_values

    def backward_weight(self, rest_values: Values) -> list[tf.Tensor]:
        """Return the gradients with respect to the weights."""
        values = rest_values | self.parts[1](rest_values)
        return [values[name] for name in self._dw]

    @cached_property
    def full_backward(self) -> TracedSegment:
        """The function that runs the whole backward pass."""
        return self._graph.cut(self._backward, [*self._dx, *self._dw])

    @cached_property
    def parts(self) -> tuple[TracedSegment, TracedSegment]:
        """The functions that run `backward_input` and `backward_weight`."""
        graph, outside = self._graph, self._outside
        # Operations that contribute only to the gradient of one weight can run later, in the
        # function `backward_weight`. Operations that contribute to several weight gradients would
        # run twice in `backward_weight`, so they belong to `backward_input`.
        uses = Counter(op for name in self._dw for op in graph.before([name], outside))
        shared = [op for op, count in uses.items() if count > 1]
        first = graph.before([*self._dx, *shared, *graph.acting], outside)
        rest = self._backward - first
        rest_values = [name for name in graph.feeds(rest, self._dw) if operation(name) in first]
        return graph.cut(first, [*self._dx, *rest_values]), graph.cut(rest, self._dw)

    def _seeded(self, saved: Values, seeds: Iterable[tf.Tensor]) -> Values:
        return saved | dict(zip(self._seeds, seeds, strict=True))


def dense(gradients: Sequence[tf.Tensor | None], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return gradients as dense tensors, with zeros shaped as in `like` for missing gradients."""
    return [
        tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
        for value, gradient in zip(like, gradients, strict=True)
    ]


def _names(tensors: Iterable[tf.Tensor]) -> list[str]:
    return [tensor.name for tensor in tensors]
