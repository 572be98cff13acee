"""One stage of a recurrent model on its rank: stretches of time steps, and the state between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.stages.compiled import Compute, Computed
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.open_time import Carried, is_open
from labkit.model_parallel.stages.stage import (
    Given,
    Loss,
    Passed,
    Stage,
    Targets,
    answer,
    listed,
    plain,
)

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
        loss, first, recompute, read: as of `Stage`.
        stretches: of a sequence; the last one has number stretches - 1.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Loss | None = None,
        first: bool = False,
        recompute: bool = False,
        stretches: int = 1,
        read: Sequence[bool] | None = None,
    ) -> None:
        super().__init__(model, loss, first, recompute, read)
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
        self, number: int, x: Passed, share: float, targets: Targets | None = None
    ) -> Passed:
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
            begin = self._begin(number, listed(x))
            given = listed(x), begin, self._aims(targets) if answers else None, counts
            self.own_loss, *found = self._go(number, compute, *given)
        states = found[len(found) - len(tf.nest.flatten(begin)) :]
        # The next stretch begins with these values, not with their graph: the gradient with respect
        # to them comes back by hand, when that stretch goes backward.
        self._ends = tf.nest.pack_sequence_as(begin, states)
        if number == self._last:  # nothing comes back to what is behind it
            self._returned = [tf.zeros_like(state) for state in states]
        return plain(found[: len(found) - len(states)]) if answers else None

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """The gradient with respect to each input; None for those of which nobody asks for it.

        Args:
            number: of the stretch; they come from the last to the first.
            gradient: with respect to the output; None at the last stage, and of no output.
            weights_later: never so: a wavefront's backward is one.
        """
        with self.computing():
            compiled, kept = self._recall(number)
            # In the order of the ends that `_answer` and `_pass_by` name: states first.
            seeds = [*self._returned, *([] if gradient is None else self._seeds(gradient))]
            found, dw = compiled.backward(kept, seeds)
            asked = sum(self._asked)
            self._returned = found[asked:]
            self._add(number, dw)
        return self._returns(found[:asked])

    def _inputs(self, x: Sequence[tf.Tensor], *others: Given) -> list[tf.Tensor]:
        return [*super()._inputs(x), *tf.nest.flatten(others[0])]

    def _answer(
        self,
        x: Sequence[tf.Tensor],
        begin: States,
        targets: Targets | None,
        share: tf.Tensor,
    ) -> Computed:
        self._carry(begin)
        results, ends, objective = self._compute(x, targets, share)
        states = self._carry_off()
        return [*results, *states], [*states, *ends], objective

    def _pass_by(
        self,
        x: Sequence[tf.Tensor],
        begin: States,
        targets: Targets | None,
        share: tf.Tensor,
    ) -> Computed:
        self._carry(begin)
        answer(self._body, x, training=True)
        states = self._carry_off()
        return [None, *states], states, tf.zeros((), share.dtype)

    def _carry(self, begin: States) -> None:
        for layer, state in zip(self._carried, begin, strict=True):
            layer.begin = state

    def _carry_off(self) -> list[tf.Tensor]:
        """The states behind the stretch; the layers are plain ones again."""
        found = [state for layer in self._carried for state in layer.end]
        for layer in self._carried:
            layer.begin, layer.end = None, []
        return found

    def _begin(self, number: int, x: Sequence[Rows]) -> States:
        if number > 0:
            return self._ends
        return [list(layer.layer.get_initial_state(len(x[0]))) for layer in self._carried]
