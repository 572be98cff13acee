"""A stage of a recurrent model: it processes time segments and keeps the state between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.model_parallel.stages.compiled import Compute, Computed
from labkit.model_parallel.stages.microbatches import Rows
from labkit.model_parallel.stages.open_time import StatefulRecurrent, is_open
from labkit.model_parallel.stages.stage import (
    Given,
    Loss,
    Passed,
    Stage,
    Targets,
    as_list,
    call_with_masks,
    unwrap_single,
)

States: TypeAlias = list[list[tf.Tensor]]  # for each recurrent layer: its state tensors


class RecurrentStage(Stage):
    r"""A stage whose micro-batches are time segments; each continues from the previous state.

    With the input \(x_i\), output \(y_i\) and recurrent state \(h_i\) of segment i, \((y_i, h_i) =
    f(x_i, h_{i-1})\) and \(h_{-1} = 0\). Backward passes run from the last segment to the first.
    The stage stores \(\partial L / \partial h_{i-1}\), the gradient of the loss with respect to the
    state, for its next backward pass. The stage sends \(\partial L / \partial x_i\), the gradient
    of the loss with respect to the input, to the previous stage. The gradients are those of
    back-propagation through all time steps of the sequence. The loss is the mean over rows and time
    steps, so the weight of a segment is its fraction of the time steps.

    If a recurrent layer returns only its last output, later layers run only in the last segment.
    In earlier segments, a stage with such a layer has no output and receives no gradient.

    TensorFlow traces segments of different lengths separately.

    Args:
        model: A part of the model that `open_time` returns.
        loss, first, recompute, read: Same arguments as those of `Stage`.
        stretches: Number of time segments of a sequence; the last segment has number stretches - 1.
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
        carried = [node for node in nodes if isinstance(node.operation, StatefulRecurrent)]
        self._layers: list[StatefulRecurrent] = [node.operation for node in carried]
        # A segment without an output runs only through the recurrent layers, because nothing reads
        # the outputs of the layers after them.
        states = [node.outputs[0] for node in carried] or model.outputs
        self._body = keras.Model(model.inputs, states)
        self._states: States = []  # state tensors after the previous segment
        # `_state_gradients` contains the gradients with respect to the states after the segment.
        self._state_gradients: list[tf.Tensor] = []

    def forward(
        self, number: int, x: Passed, share: float, targets: Targets | None = None
    ) -> Passed:
        """Return a segment's output or None; the last stage returns the segment's part of the loss.

        Args:
            number: Number of the segment; segments run in order.
            x: Input of the segment at this stage.
            share: Weight of the segment's losses, which is its fraction of the time steps.
            targets: Pair (targets, sample weights), used at the last stage.
        """
        answers = self._open or number == self._last
        # If only the last segment has an output, the loss and the losses that layers add are
        # counted once, with weight 1.
        counts = self._share(share if self._open else 1.0)
        compute: Compute = self._compute_outputs if answers else self._update_states
        with self.computing():
            begin = self._begin(number, as_list(x))
            arguments = as_list(x), begin, self._loss_targets(targets) if answers else None, counts
            self.own_loss, *results = self._run_forward(number, compute, *arguments)
        states = results[len(results) - len(tf.nest.flatten(begin)) :]
        # The next segment starts from the values of these states; its graph is not connected to the
        # graph of this segment. Therefore the backward pass of the next segment explicitly returns
        # the gradient with respect to these states.
        self._states = tf.nest.pack_sequence_as(begin, states)
        if number == self._last:  # the last segment's final state has gradient zero
            self._state_gradients = [tf.zeros_like(state) for state in states]
        return unwrap_single(results[: len(results) - len(states)]) if answers else None

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """Return the gradient with respect to each input; None for inputs without a gradient.

        Args:
            number: Number of the segment; segments run from last to first.
            gradient: Gradient with respect to the output; None at the last stage, and for a segment
                without an output.
            weights_later: Ignored, because the backward pass of a wavefront schedule is not divided
                into two parts.
        """
        with self.computing():
            compiled, saved = self._restore(number)
            # The gradients of the states come first, because `_compute_outputs` and
            # `_update_states` return the states before the outputs.
            seeds = [*self._state_gradients, *([] if gradient is None else self._seeds(gradient))]
            gradients, dw = compiled.backward(saved, seeds)
            count = sum(self._needs_gradient)
            self._state_gradients = gradients[count:]
            self._add(number, dw)
        return self._returns(gradients[:count])

    def _inputs(self, x: Sequence[tf.Tensor], *others: Given) -> list[tf.Tensor]:
        return [*super()._inputs(x), *tf.nest.flatten(others[0])]

    def _compute_outputs(
        self,
        x: Sequence[tf.Tensor],
        begin: States,
        targets: Targets | None,
        share: tf.Tensor,
    ) -> Computed:
        self._set_states(begin)
        results, ends, objective = self._compute(x, targets, share)
        states = self._collect_states()
        return [*results, *states], [*states, *ends], objective

    def _update_states(
        self,
        x: Sequence[tf.Tensor],
        begin: States,
        targets: Targets | None,
        share: tf.Tensor,
    ) -> Computed:
        self._set_states(begin)
        call_with_masks(self._body, x, training=True)
        states = self._collect_states()
        return [None, *states], states, tf.zeros((), share.dtype)

    def _set_states(self, begin: States) -> None:
        for layer, state in zip(self._layers, begin, strict=True):
            layer.begin = state

    def _collect_states(self) -> list[tf.Tensor]:
        """Return the states after a segment, and reset the states that the layers store."""
        states = [state for layer in self._layers for state in layer.end]
        for layer in self._layers:
            layer.begin, layer.end = None, []
        return states

    def _begin(self, number: int, x: Sequence[Rows]) -> States:
        if number > 0:
            return self._states
        return [list(layer.layer.get_initial_state(len(x[0]))) for layer in self._layers]
