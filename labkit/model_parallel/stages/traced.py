"""One traced graph, out of which functions are cut at any of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import tensorflow as tf

Specs: TypeAlias = "tf.TensorSpec | Sequence[Specs] | None"  # a nest, None where nothing is


class Graph:
    """Operations by their names, and what they read.

    Args:
        trace: makes the operations.
        specs: what its arguments are, and None where it gets None.

    Attributes:
        inputs: names of the tensors that stand for the arguments.
        acting: operations that do more than to compute an output; TensorFlow runs them in the
            order of their making.
    """

    def __init__(self, trace: Callable[..., None], specs: Sequence[Specs]) -> None:
        # It is kept because Python functions that operations call live as long as it does.
        # As Keras traces: nothing in a layer or a loss is translated.
        traced = tf.function(trace, autograph=False)
        self._traced = traced.get_concrete_function(*specs)
        graph, captured = self._traced.graph, self._traced.captured_inputs
        names = [tensor.name for tensor in self._traced.inputs]
        own = len(names) - len(captured)
        self.inputs = names[:own]
        self._captured = dict(zip(names[own:], captured, strict=True))
        self._ends = {operation(name) for name in names}
        self._definition = graph.as_graph_def()
        self._nodes = {node.name: node for node in self._definition.node}
        self.acting = {each.name for each in graph.get_operations() if each.op_def.is_stateful}

    def before(self, names: Iterable[str], outside: Collection[str] = ()) -> set[str]:
        """The operations that tensors or operations come from, up to inputs and what is outside."""
        found: set[str] = set()
        left = [operation(name) for name in names]
        while left:
            name = left.pop()
            if name not in found and name not in self._ends and name not in outside:
                found.add(name)
                left += map(operation, self._nodes[name].input)
        return found

    def feeds(self, operations: Collection[str], fetches: Iterable[str]) -> list[str]:
        """The tensors that a function of these operations must be given to make others."""
        read = {
            _tensor(name)
            for each in operations
            for name in self._nodes[each].input
            if not name.startswith("^")
        }
        outside = {name for name in read.union(fetches) if operation(name) not in operations}
        return sorted(name for name in outside if not self._is_always_there(name))

    def cut(self, operations: Collection[str], fetches: Sequence[str]) -> Cut:
        """The function of these operations that makes some tensors, or hands them on.

        What an operation waits for without reading it counts inside the function alone: of two
        functions, the one with what comes first in the graph is to be called first.
        """
        read = [name for each in operations for name in self._nodes[each].input]
        # Constants are copied into each function that reads them: fed in, they would be kept.
        makers = set(map(operation, [*read, *fetches]))
        inside = {*operations, *(name for name in makers if self._nodes[name].op == "Const")}
        nodes = [_without(node, inside) for node in self._definition.node if node.name in inside]
        part = tf.compat.v1.GraphDef(
            node=nodes, library=self._definition.library, versions=self._definition.versions
        )
        specs = {name: self._spec(name) for name in self.feeds(inside, fetches)}
        return Cut(part, specs, self._captured, list(dict.fromkeys(fetches)))

    def _is_always_there(self, name: str) -> bool:
        return name in self._captured or self._nodes[operation(name)].op == "Const"

    def _spec(self, name: str) -> tf.TensorSpec:
        tensor = self._traced.graph.get_tensor_by_name(name)
        return tf.TensorSpec(tensor.shape, tensor.dtype)


class Cut:
    """A compiled function of tensors that goes by their names in a `Graph`.

    Args:
        part: its operations, as a `GraphDef`.
        specs: of the tensors that come in.
        captured: what the graph has taken from outside, of which some may be read here.
        fetches: names of the tensors that come out; some may be among those that come in.
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
            given = dict(zip(self.feeds, values, strict=True))
            known = {name: value for name, value in given.items() if name in read}
            for name in read.intersection(captured):
                known[name] = tf.compat.v1.get_default_graph().capture(captured[name])
            found = tf.import_graph_def(part, known, self._fetches, name="part")
            self._types = [tensor.dtype for tensor in found]
            # The call below does not hand out shapes as they are: they travel as int64.
            return [tf.cast(x, tf.int64) if x.dtype == tf.int32 else x for x in found]

        function = tf.function(run, autograph=False)
        self._function = function.get_concrete_function(*specs.values())
        self._returned = [tensor.dtype for tensor in self._function.outputs]

    def __call__(self, values: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The tensors that come out, by their names; values may hold more than is read."""
        given = [values[name] for name in self.feeds]
        # As calling the function itself, which takes far longer to look at its arguments.
        found = tf.raw_ops.StatefulPartitionedCall(
            args=given + self._function.captured_inputs, Tout=self._returned, f=self._function
        )
        made = zip(self._fetches, found, self._types, strict=True)
        return {name: tf.cast(x, to) if to == tf.int32 else x for name, x, to in made}


def operation(name: str) -> str:
    """The operation of a tensor, or of an input of another operation."""
    return name.removeprefix("^").partition(":")[0]


def _tensor(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _without(node: tf.compat.v1.NodeDef, inside: Collection[str]) -> tf.compat.v1.NodeDef:
    """A node of its own that waits for nothing outside."""
    found = tf.compat.v1.NodeDef()
    found.CopyFrom(node)
    # Hints to stand beside operations that may not be in this function.
    found.attr.pop("_class", None)
    del found.input[:]
    found.input.extend(
        name for name in node.input if not name.startswith("^") or operation(name) in inside
    )
    return found
