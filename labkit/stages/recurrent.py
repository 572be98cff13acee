"""One stage of a recurrent model on its rank: stretches of time steps, and the state between."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from labkit.stages.open_time import Carried, is_open
from labkit.stages.stage import Loss, Stage


class RecurrentStage(Stage):
    r"""A stage whose micro-batches are stretches of time, each of which goes on from the last.

    With the recurrent state \(h_i\) behind stretch i, \((y_i, h_i) = f(x_i, h_{i-1})\) and
    \(h_{-1} = 0\). Backward, from the last stretch to the first, the stage hands
    \(\partial L / \partial h_{i-1}\) on to itself, and \(\partial L / \partial x_i\) to the stage
    before: back-propagation through all of time. The loss is the mean over rows and steps, so a
    stretch counts by its share of the steps.

    Where a recurrent layer gives its last output alone, what lies behind it sees the last stretch
    only: of those before it there is no output here, and no gradient comes back.

    Args:
        model: a part of `open_time(model)`.
        loss, first, recompute: as of `Stage`.
        stretches: of a sequence; the last one has number stretches - 1.
    """

    def __init__(
        self,
        model: Any,
        loss: Loss | None = None,
        first: bool = False,
        recompute: bool = False,
        stretches: int = 1,
    ) -> None:
        super().__init__(model, loss, first, recompute)
        self._last, self._open = stretches - 1, is_open(model.outputs[0])
        nodes = [node for nodes in model._nodes_by_depth.values() for node in nodes]
        carried = [node for node in nodes if isinstance(node.operation, Carried)]
        self._carried: list[Carried] = [node.operation for node in carried]
        # What a stretch goes through where nothing comes out: the layers that have a state.
        states = [node.outputs[0] for node in carried] or model.outputs
        self._body: Any = keras.Model(model.inputs, states)
        self._passes: dict[int, Any] = {}  # by length: a traced layer may want to know it
        self._ends: list[list[Any]] = []  # of the stretch before, as all below a list a layer
        self._returned: list[list[Any]] = []  # gradients with respect to the state behind it

    def forward(self, number: int, x: Any, share: float, targets: Any = None) -> Any:
        """The output of a stretch, or None; at the last stage its part of the loss, a scalar.

        Args:
            number: of the stretch; they come in their order.
            x: its input.
            share: of its steps in the sequence, by which losses count.
            targets: (y, sample weights) at the last stage.
        """
        now = [tf.identity(variable.value) for variable in self._state]
        given = number, x, self._begin(number, x)
        with self.ledger.look() as made:
            tape, (y, ends), objective = self._record(given, share, targets)
        self._ends = ends
        if self._recompute:
            self._kept[number] = (None, None, None, given, share, targets, now)
            made = now
        else:
            self._kept[number] = (tape, (y, ends), objective, given, share, targets, now)
        self._enter(given, made)
        self.most_kept = max(self.most_kept, len(self._kept))
        return objective if self._loss is not None else y

    def backward(self, number: int, gradient: Any, weights_later: bool = False) -> Any:
        """The gradient with respect to the input; None at the first stage.

        Args:
            number: of the stretch; they come from the last to the first.
            gradient: with respect to the output; None at the last stage, and of no output.
            weights_later: never so: a wavefront's backward is one.
        """
        tape, found, objective, given, share, targets, then = self._kept.pop(number)
        if tape is None:
            with self.ledger.look() as made:
                tape, found, objective = self._again(given, share, targets, then)
            self._enter(given, [*then, *made])
        (y, ends), (_, x, begin) = found, given
        pairs = [(objective, tf.ones_like(objective))]
        if gradient is not None:
            pairs.append((y, gradient))
        if number < self._last:
            pairs += zip(tf.nest.flatten(ends), tf.nest.flatten(self._returned), strict=True)
        outputs, seeds = zip(*pairs, strict=True)
        inputs = [] if self._first else [x]
        weights = [variable.value for variable in self.variables]
        dx, dbegin, dw = tape.gradient(list(outputs), [inputs, begin, weights], list(seeds))
        self._returned = _dense(dbegin, begin)
        self._add(dw)
        self.ledger.drop(self, number)
        return _dense(dx, inputs)[0] if inputs else None

    def _record(self, given: Any, share: float, targets: Any) -> tuple[Any, Any, Any]:
        number, x, begin = given
        with tf.GradientTape() as tape:
            if not self._first:
                tape.watch(x)
            tape.watch(begin)
            y, ends, own = self._pass(x)(x, begin, self._open or number == self._last)
            # An output of the last step alone counts once, with the losses of the layers here.
            weight = tf.constant(share if self._open else 1.0, own.dtype)
            objective = own * weight
            if self._loss is not None and y is not None:
                objective += tf.cast(self._loss(targets[0], y, targets[1]), own.dtype) * weight
        return tape, (y, ends), objective

    def _stretch(self, x: Any, begin: Any, answers: bool) -> tuple[Any, Any, Any]:
        for layer, state in zip(self._carried, begin, strict=True):
            layer.begin = state
        if answers:
            y, own = self._forward(x)
        else:
            self._body(x, training=True)
            y, own = None, tf.zeros((), keras.config.floatx())
        ends = [layer.end for layer in self._carried]
        for layer in self._carried:  # it is a plain layer again
            layer.begin, layer.end = None, []
        return y, ends, own

    def _enter(self, given: Any, made: list[Any]) -> None:
        number, *rest = given
        kept = [*tf.nest.flatten(rest), *made]
        self.ledger.keep(self, number, kept, self.model.variables)

    def _pass(self, x: Any) -> Any:
        length = int(x.shape[1])
        if length not in self._passes:
            self._passes[length] = tf.function(self._stretch, reduce_retracing=True)
        return self._passes[length]

    def _begin(self, number: int, x: Any) -> list[list[Any]]:
        if number > 0:
            return self._ends
        return [list(layer.layer.get_initial_state(len(x))) for layer in self._carried]


def _dense(found: Any, like: Any) -> Any:
    """Gradients, and zeros where there is none."""

    def one(gradient: Any, value: Any) -> Any:
        return tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)

    return tf.nest.map_structure(one, found, like)
