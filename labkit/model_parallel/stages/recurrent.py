"""A stage of a recurrent model: segments of time steps, and the state between segments."""

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

States: TypeAlias = list[list[tf.Tensor]]  # state tensors of each recurrent layer


class RecurrentStage(Stage):
    r"""A stage whose micro-batches are time segments that continue from the previous state.

    With the recurrent state \(h_i\) after segment i, \((y_i, h_i) = f(x_i, h_{i-1})\) and
    \(h_{-1} = 0\). Backward passes run from the last segment to the first. The stage keeps
    \(\partial L / \partial h_{i-1}\) for its next backward pass, and sends
    \(\partial L / \partial x_i\) to the previous stage. The result is back-propagation through all
    time steps. The loss is the mean over rows and steps, so a segment's weight is its fraction of
    the steps.

    If a recurrent layer returns only its last output, later layers run only for the last segment.
    For earlier segments this stage then has no output and receives no gradient.

    Segments of different lengths are traced separately.

    Args:
        model: A part of `open_time(model)`.
        loss, first, recompute, read: See `Stage`.
        stretches: Number of segments of a sequence; the last segment has number stretches - 1.
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
        # Without an output, a segment runs only through layers with a state; later layers would
        # compute outputs that no layer reads.
        states = [node.outputs[0] for node in carried] or model.outputs
        self._body = keras.Model(model.inputs, states)
        self._states: States = []  # states after the previous segment
        # Gradients with respect to the states after a segment.
        self._state_gradients: list[tf.Tensor] = []

    def forward(
        self, number: int, x: Passed, share: float, targets: Targets | None = None
    ) -> Passed:
        """Return a segment's output (None without output); at the last stage, its part of the loss.

        Args:
            number: Number of the segment; segments run in order.
            x: Input of the segment.
            share: Weight of the segment's losses, which is its fraction of the time steps.
            targets: (y, sample weights) at the last stage.
        """
        answers = self._open or number == self._last
        # If only the last step has an output, this output and the layers' losses count once.
        counts = self._share(share if self._open else 1.0)
        compute: Compute = self._compute_outputs if answers else self._update_states
        with self.computing():
            begin = self._begin(number, as_list(x))
            arguments = as_list(x), begin, self._loss_targets(targets) if answers else None, counts
            self.own_loss, *results = self._run_forward(number, compute, *arguments)
        states = results[len(results) - len(tf.nest.flatten(begin)) :]
        # The next segment starts from these values, not from their graph. Its backward returns the
        # gradient with respect to them explicitly.
        self._states = tf.nest.pack_sequence_as(begin, states)
        if number == self._last:  # no gradient reaches the final state
            self._state_gradients = [tf.zeros_like(state) for state in states]
        return unwrap_single(results[: len(results) - len(states)]) if answers else None

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """Return the gradient with respect to each input; None for inputs without a gradient.

        Args:
            number: Number of the segment; segments run from last to first.
            gradient: Gradient with respect to the output; None at the last stage or without an
                output.
            weights_later: Ignored, because a wavefront's backward has only one part.
        """
        with self.computing():
            compiled, saved = self._restore(number)
            # Gradients of states come first, because both `_compute_outputs` and `_update_states`
            # return the states before the outputs.
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
        """Return the states after the segment, and reset the layers."""
        states = [state for layer in self._layers for state in layer.end]
        for layer in self._layers:
            layer.begin, layer.end = None, []
        return states

    def _begin(self, number: int, x: Sequence[Rows]) -> States:
        if number > 0:
            return self._states
        return [list(layer.layer.get_initial_state(len(x[0]))) for layer in self._layers]
