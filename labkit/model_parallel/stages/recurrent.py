"""One stage of a recurrent model on its rank: stretches of time steps, and the state between."""

from __future__ import annotations

from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.stages.compiled import Compute, Computed
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.open_time import Carried, is_open
from labkit.model_parallel.stages.stage import Given, Loss, Stage, Targets

States: TypeAlias = list[list[tf.Tensor]]  # a list a recurrent layer


class RecurrentStage(Stage):
    r"""A stage whose micro-batches are stretches of time, each of which goes on from the last.

    With the recurrent state \(h_i\) behind stretch i, \((y_i, h_i) = f(x_i, h_{i-1})\) and
    \(h_{-1} = 0\). Backward, from the last stretch to the first, the stage hands
    \(\partial L / \partial h_{i-1}\) on to itself, and \(\partial L / \partial x_i\) to the stage
    before: back-propagation through all of time. The loss is the mean over rows and steps, so a
    stretch counts by its share of the steps.

    Where a recurrent layer gives its last output alone, what lies behind it sees the last stretch
    only: of those before it there is no output here, and no gradient comes back.

    Stretches of different lengths are traced each.

    Args:
        model: a part of `open_time(model)`.
        loss, first, recompute: as of `Stage`.
        stretches: of a sequence; the last one has number stretches - 1.
    """

    def __init__(
        self,
        model: keras.Model,
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
        # What a stretch goes through where nothing comes out: the layers that have a state. Those
        # behind them would compute outputs that nobody reads.
        states = [node.outputs[0] for node in carried] or model.outputs
        self._body = keras.Model(model.inputs, states)
        self._ends: States = []  # of the stretch before
        self._returned: list[
            tf.Tensor
        ] = []  # gradients with respect to the states behind a stretch

    def forward(
        self, number: int, x: Rows, share: float, targets: Targets | None = None
    ) -> tf.Tensor | None:
        """The output of a stretch, or None; at the last stage its part of the loss, a scalar.

        Args:
            number: of the stretch; they come in their order.
            x: its input.
            share: of its steps in the sequence, by which losses count.
            targets: (y, sample weights) at the last stage.
        """
        answers = self._open or number == self._last
        # An output of the last step alone counts once, with the losses of the layers here.
        counts = self._share(share if self._open else 1.0)
        compute: Compute = self._answer if answers else self._pass_by
        with self.computing():
            begin = self._begin(number, x)
            given = x, begin, self._aims(targets) if answers else None, counts
            found, self.own_loss, *states = self._go(number, compute, *given)
        # The next stretch begins with these values, not with their graph: the gradient with respect
        # to them comes back by hand, when that stretch goes backward.
        self._ends = tf.nest.pack_sequence_as(begin, states)
        if number == self._last:  # nothing comes back to what is behind it
            self._returned = [tf.zeros_like(state) for state in states]
        return found

    def backward(
        self, number: int, gradient: tf.Tensor | None, weights_later: bool = False
    ) -> tf.Tensor | None:
        """The gradient with respect to the input; None at the first stage.

        Args:
            number: of the stretch; they come from the last to the first.
            gradient: with respect to the output; None at the last stage, and of no output.
            weights_later: never so: a wavefront's backward is one.
        """
        with self.computing():
            compiled, kept = self._recall(number)
            # In the order of the ends that `_answer` and `_pass_by` name: states first.
            seeds = [*self._returned, *([] if gradient is None else [gradient])]
            found, dw = compiled.backward(kept, seeds)
            dx, self._returned = ([], found) if self._first else (found[:1], found[1:])
            self._add(number, dw)
        return dx[0] if dx else None

    def _inputs(self, x: tf.Tensor, *others: Given) -> list[tf.Tensor]:
        return [*super()._inputs(x), *tf.nest.flatten(others[0])]

    def _answer(
        self, x: tf.Tensor, begin: States, targets: Targets | None, share: tf.Tensor
    ) -> Computed:
        self._carry(begin)
        results, ends, objective = self._compute(x, targets, share)
        states = self._carry_off()
        return [*results, *states], [*states, *ends], objective

    def _pass_by(
        self, x: tf.Tensor, begin: States, targets: Targets | None, share: tf.Tensor
    ) -> Computed:
        self._carry(begin)
        self._body(x, training=True)
        states = self._carry_off()
        return [None, None, *states], states, tf.zeros((), share.dtype)

    def _carry(self, begin: States) -> None:
        for layer, state in zip(self._carried, begin, strict=True):
            layer.begin = state

    def _carry_off(self) -> list[tf.Tensor]:
        """The states behind the stretch; the layers are plain ones again."""
        found = [state for layer in self._carried for state in layer.end]
        for layer in self._carried:
            layer.begin, layer.end = None, []
        return found

    def _begin(self, number: int, x: Rows) -> States:
        if number > 0:
            return self._ends
        return [list(layer.layer.get_initial_state(len(x))) for layer in self._carried]
