"""A traced graph, of which parts can be extracted as separate functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

# A nested structure, with None for missing values.
Specs: TypeAlias = "tf.TensorSpec | Sequence[Specs] | None"


class TracedGraph:
    """The operations of a traced TensorFlow function, by name, with their inputs.

    Args:
        trace: Function that creates the operations.
        specs: Shapes and dtypes of the arguments of `trace`; None for each missing argument.

    Attributes:
        inputs: Names of the tensors that represent the arguments.
        acting: Names of stateful operations, which TensorFlow runs in the order of their creation.
    """

    def __init__(self, trace: Callable[..., None], specs: Sequence[Specs]) -> None:
        # The traced function is stored to keep it alive, because it owns the Python functions that
        # its operations call. Keras does not use autograph to trace models, so this trace does not
        # use it either.
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
        """Return the operations `names` and all their ancestors, up to the inputs or `outside`."""
        ancestors: set[str] = set()
        pending = [operation(name) for name in names]
        while pending:
            name = pending.pop()
            if name not in ancestors and name not in self._ends and name not in outside:
                ancestors.add(name)
                pending += map(operation, self._nodes[name].input)
        return ancestors

    def feeds(self, operations: Collection[str], fetches: Iterable[str]) -> list[str]:
        """Return the input tensors from which these operations compute the tensors `fetches`."""
        read = {
            _tensor(name)
            for op in operations
            for name in self._nodes[op].input
            if not name.startswith("^")
        }
        outside = {name for name in read.union(fetches) if operation(name) not in operations}
        return sorted(name for name in outside if not self._is_constant(name))

    def cut(self, operations: Collection[str], fetches: Sequence[str]) -> TracedSegment:
        """Return a function that runs these operations and returns the tensors `fetches`.

        The extracted function contains only those control dependencies that connect its own
        operations. If the operations of two functions must run in a certain order, the caller must
        call the functions in that order.
        """
        read = [name for op in operations for name in self._nodes[op].input]
        # Constants are copied into each function; as arguments, they would have to be stored by the
        # caller.
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
    """A compiled function of tensors, which are named as in the `TracedGraph` they come from.

    Args:
        part: Operations of the function, as a `GraphDef`.
        specs: Shapes and dtypes of the input tensors, by name.
        captured: Variables outside of the graph that it reads, by tensor name; this function may
            read only some of them.
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
            # The operation `StatefulPartitionedCall` in `__call__` cannot return int32 tensors such
            # as shapes, so they are cast to int64.
            return [tf.cast(x, tf.int64) if x.dtype == tf.int32 else x for x in outputs]

        function = tf.function(run, autograph=False)
        self._function = function.get_concrete_function(*specs.values())
        self._returned = [tensor.dtype for tensor in self._function.outputs]

    def __call__(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Run the function on `values`, tensors by name; return the output tensors by name."""
        arguments = [values[name] for name in self.feeds]
        # A direct call of the function would give the same result, but would take longer to inspect
        # its arguments.
        outputs = tf.raw_ops.StatefulPartitionedCall(
            args=arguments + self._function.captured_inputs, Tout=self._returned, f=self._function
        )
        results = zip(self._fetches, outputs, self._types, strict=True)
        return {name: tf.cast(x, to) if to == tf.int32 else x for name, x, to in results}


def operation(name: str) -> str:
    """Return the name of the operation that produces a tensor or an operation's input."""
    return name.removeprefix("^").partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _without_outside_controls(
    node: tf.compat.v1.NodeDef, inside: Collection[str]
) -> tf.compat.v1.NodeDef:
    """Return a copy of a node that has control dependencies only on operations in `inside`."""
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    # The attribute `_class` requests placement on the device of other operations, which this
    # function may not contain.
    copy.attr.pop("_class", None)
    del copy.input[:]
    copy.input.extend(
        name for name in node.input if not name.startswith("^") or operation(name) in inside
    )
    return copy
