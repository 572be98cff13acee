"""A computation and its gradients as compiled functions of one graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.stages.traced import Cut, Graph, Specs, operation

Values: TypeAlias = dict[str, tf.Tensor]  # by their names in the graph
# Results, each a tensor or None; the tensors whose gradients come from outside; an objective.
Computed: TypeAlias = tuple[list[tf.Tensor | None], list[tf.Tensor], tf.Tensor]
Compute: TypeAlias = Callable[..., Computed]


class Compiled:
    r"""Forward, and backward in one or in two parts; none repeats what another one has done.

        forward             arguments    ->  results, kept
        backward            kept, seeds  ->  dx, dw
        backward_input      kept, seeds  ->  dx, left
        backward_weight     left         ->  dw

    The input part makes the gradients that others come from: all that leads to the inputs, or to
    two weights or more. For the weight part remain the products that make weight gradients.
    What one operation makes together is of the input part, such as the loop of a recurrent layer
    back through its steps. So are operations that do something besides, such as to call Python or
    to exchange messages. Like those of the forward pass they run once, in the order of the trace.

    Args:
        compute: of the arguments; returns results, each a tensor or None; those of the tensors
            whose gradients (seeds) come from outside; and an objective of its own, a scalar.
        specs: of the arguments, a nest each, with None where there is nothing.
        inputs: picks from the arguments those with respect to which gradients are asked for.
        variables: the weights.
    """

    def __init__(
        self,
        compute: Compute,
        specs: Sequence[Specs],
        inputs: Callable[..., list[tf.Tensor]],
        variables: Sequence[keras.Variable],
    ) -> None:
        begun: list[str] = []  # operations that are there before the first one of the backward pass

        def trace(*arguments: tf.Tensor | None) -> None:
            wanted, weights = inputs(*arguments), [variable.value for variable in variables]
            with tf.GradientTape() as tape:
                tape.watch(wanted)
                results, ends, objective = compute(*arguments)
            begun[:] = [each.name for each in tf.compat.v1.get_default_graph().get_operations()]
            # Gradients come from the next stage after the forward pass: places for them are held in
            # the same graph, so that both passes share what they need of each other.
            seeds = [tf.compat.v1.placeholder(end.dtype, end.shape) for end in ends]
            given = [tf.ones_like(objective), *seeds]
            dx, dw = tape.gradient([objective, *ends], [wanted, weights], given)
            self._results = [None if result is None else result.name for result in results]
            self._seeds = _names(seeds)
            self._dx, self._dw = _names(dense(dx, wanted)), _names(dense(dw, weights))

        self._graph = graph = Graph(trace, specs)
        # All that was there before the backward pass is forward, also what nothing reads later:
        # statistics are updated, random seeds move on.
        forward = graph.before(begun)
        ends, self._outside = [*self._dx, *self._dw], {*forward, *map(operation, self._seeds)}
        self._backward = graph.before([*ends, *graph.acting], self._outside)
        self._kept = set(graph.feeds(self._backward, ends)).difference(self._seeds)
        results = [name for name in self._results if name is not None]
        self.ahead = graph.cut(forward, [*results, *sorted(self._kept)])

    def forward(self, arguments: Iterable[tf.Tensor]) -> tuple[list[tf.Tensor | None], Values]:
        """The results; and the tensors that the backward pass reads, those of the weights too.

        Args:
            arguments: the tensors in the nests, one after the other.
        """
        values: Values = dict(zip(self._graph.inputs, arguments, strict=True))
        values |= self.ahead(values)
        results = [None if name is None else values[name] for name in self._results]
        return results, {name: values[name] for name in self._kept}

    def backward(
        self, kept: Values, seeds: Iterable[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The gradients with respect to inputs and weights."""
        values = self._seeded(kept, seeds)
        values |= self.whole(values)
        return [values[name] for name in self._dx], [values[name] for name in self._dw]

    def backward_input(
        self, kept: Values, seeds: Iterable[tf.Tensor]
    ) -> tuple[list[tf.Tensor], Values]:
        """The gradients with respect to inputs; and what `backward_weight` takes."""
        first, second = self.parts
        values = self._seeded(kept, seeds)
        values |= first(values)
        left = {name: values[name] for name in second.feeds}
        return [values[name] for name in self._dx], left

    def backward_weight(self, left: Values) -> list[tf.Tensor]:
        """The gradients with respect to weights."""
        values = left | self.parts[1](left)
        return [values[name] for name in self._dw]

    @cached_property
    def whole(self) -> Cut:
        """All of the backward pass."""
        return self._graph.cut(self._backward, [*self._dx, *self._dw])

    @cached_property
    def parts(self) -> tuple[Cut, Cut]:
        """Input part and weight part."""
        graph, outside = self._graph, self._outside
        # What leads to a single weight can wait for the weight part; what leads to two or more
        # would be computed twice, and is of the input part.
        uses = Counter(each for name in self._dw for each in graph.before([name], outside))
        shared = [each for each, count in uses.items() if count > 1]
        first = graph.before([*self._dx, *shared, *graph.acting], outside)
        rest = self._backward - first
        left = [name for name in graph.feeds(rest, self._dw) if operation(name) in first]
        return graph.cut(first, [*self._dx, *left]), graph.cut(rest, self._dw)

    def _seeded(self, kept: Values, seeds: Iterable[tf.Tensor]) -> Values:
        return kept | dict(zip(self._seeds, seeds, strict=True))


def dense(found: Sequence[tf.Tensor | None], like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Gradients with respect to tensors, and zeros where there is none."""
    return [
        tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
        for value, gradient in zip(like, found, strict=True)
    ]


def _names(tensors: Iterable[tf.Tensor]) -> list[str]:
    return [tensor.name for tensor in tensors]
