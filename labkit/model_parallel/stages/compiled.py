"""A computation and its gradients, traced in one graph and compiled as separate functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.stages.traced import Specs, TracedGraph, TracedSegment, operation

Values: TypeAlias = dict[str, tf.Tensor]  # tensors by their names in the graph
# A computation returns three things: its results (a tensor or None each), the tensors whose
# gradients are passed in, and a scalar objective.
Computed: TypeAlias = tuple[list[tf.Tensor | None], list[tf.Tensor], tf.Tensor]
Compute: TypeAlias = Callable[..., Computed]


class Compiled:
    """Compiled forward and backward passes of a computation; backward may run as two functions.

        forward             arguments    ->  results, saved
        backward            saved, seeds ->  dx, dw
        backward_input      saved, seeds ->  dx, rest
        backward_weight     rest         ->  dw

    None of these functions repeats a computation of another one. `backward_input` computes all
    intermediate gradients that lead to the inputs, or to at least two weights. `backward_weight`
    computes the weight gradients from the remaining matrix products.

    An operation that computes several gradients, such as the backward loop of a recurrent layer,
    belongs to `backward_input`. Operations with side effects, such as calls to Python functions or
    messages, also belong to `backward_input`. Operations with side effects run once, in trace
    order, as in the forward pass.

    Args:
        compute: Function of the arguments that returns results (a tensor or None each), tensors
            whose gradients are passed in as seeds, and a scalar objective.
        specs: Shapes and dtypes of the arguments: one nest per argument, None for missing values.
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
        forward_names: list[str] = []  # operations traced before the backward pass

        def trace(*arguments: tf.Tensor | None) -> None:
            watched, weights = inputs(*arguments), [variable.value for variable in variables]
            with tf.GradientTape() as tape:
                tape.watch(watched)
                results, ends, objective = compute(*arguments)
            forward_names[:] = [op.name for op in tf.compat.v1.get_default_graph().get_operations()]
            # The gradients from the next stage arrive only after the forward pass. Placeholders
            # represent the gradients from the next stage, so that forward and backward are one
            # graph and share tensors.
            seeds = [tf.compat.v1.placeholder(end.dtype, end.shape) for end in ends]
            initial = [tf.ones_like(objective), *seeds]
            dx, dw = tape.gradient([objective, *ends], [watched, weights], initial)
            self._results = [None if result is None else result.name for result in results]
            self._seeds = _names(seeds)
            self._dx, self._dw = _names(dense(dx, watched)), _names(dense(dw, weights))

        self._graph = graph = TracedGraph(trace, specs)
        # All operations traced before the backward pass belong to the forward pass, even if no
        # other operation reads their results. Such operations may update statistics or advance
        # random seeds.
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
        # Operations that contribute to the gradient of only one weight can wait for
        # `backward_weight`. Operations that contribute to several weight gradients would run twice
        # in `backward_weight`, so they belong to `backward_input`.
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
