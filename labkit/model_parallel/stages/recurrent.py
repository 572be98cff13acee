"""A stage of a recurrent model: it processes time segments and keeps the state between them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.model_parallel.stages.compiled import Compute, Computed
from labkit.model_parallel.stages.model_blocks import BlockChain
from labkit.model_parallel.stages.stage import (
    Given,
    Loss,
    Passed,
    Rows,
    Stage,
    Targets,
    as_list,
    call_with_masks,
    unwrap_single,
)

Shape: TypeAlias = tuple[int | None, ...]
# The type `Argument` describes arguments of layer calls: nested structures of tensors and Python
# values.
Argument: TypeAlias = "keras.KerasTensor | Sequence[Argument] | bool | int | float | str | None"

Layers = keras.layers
RECURRENT = (Layers.LSTM, Layers.GRU, Layers.SimpleRNN)
EACH_STEP = (
    Layers.Embedding,
    Layers.Masking,
    Layers.Dense,
    Layers.TimeDistributed,
    Layers.Reshape,
    Layers.LayerNormalization,
    Layers.Activation,
    Layers.ReLU,
    Layers.LeakyReLU,
    Layers.ELU,
    Layers.Softmax,
    Layers.Dropout,
    Layers.Rescaling,
    Layers.Add,
    Layers.Subtract,
    Layers.Multiply,
    Layers.Average,
    Layers.Maximum,
    Layers.Minimum,
    Layers.Concatenate,
)
# Embedding and Masking layers compute their masks with the operations in `_MASKS`, separately for
# each time step.
_MASKS = ("NotEqual", "Any")
ALLOWED = (
    f"allowed are {', '.join(kind.__name__ for kind in RECURRENT)}, and layers that act on each "
    f"step separately: {', '.join(kind.__name__ for kind in EACH_STEP)}; after a layer "
    "with return_sequences=False, any layer is allowed"
)


class StatefulRecurrent(keras.layers.Layer):
    """A recurrent layer that starts from a given state and stores its final state.

    Attributes:
        begin: The state before the first step; None means zeros.
        end: The state after the last step of the most recent call.
    """

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, trainable=layer.trainable)
        self.layer, self.built = layer, True
        self.begin: list[tf.Tensor] | None = None
        self.end: list[tf.Tensor] = []

    def call(self, x: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        """Return the layer's outputs for a segment, and store the layer's final state in `end`."""
        # The whole model calls the same layer object without the option `return_state`. The option
        # `return_state` is therefore True only during the call for one segment.
        self.layer.return_state = True
        try:
            y, *self.end = self.layer(x, initial_state=self.begin, mask=mask)
        finally:
            self.layer.return_state = False
        if mask is None or self.begin is None or self.layer.zero_output_for_mask:
            return y
        # In every recurrent Keras layer, the first state tensor equals the layer's output.
        return self._with_previous_output(y, mask, self.begin[0])

    def compute_mask(self, x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | None:
        """Return the mask of the wrapped layer's output."""
        return self.layer.compute_mask(x, mask)

    def _with_previous_output(self, y: tf.Tensor, mask: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        """Replace outputs before the first unmasked time step by the previous segment's output.

        At a masked time step, Keras repeats the previous output. Before the first unmasked time
        step of a call, Keras returns zeros.
        """
        if not self.layer.return_sequences:
            return tf.where(tf.reduce_any(mask, axis=1)[:, None], y, before)
        unmasked = tf.cumsum(tf.cast(mask, tf.int32), axis=1) > 0
        return tf.where(unmasked[..., None], y, before[:, None])

    def compute_output_shape(self, shape: Shape) -> Shape:
        """Return the output shape of the wrapped layer."""
        output: Shape = self.layer.compute_output_shape(shape)
        return output


def open_time(model: keras.Model) -> keras.Model:
    """Return a `keras.Model` of the same layers that accepts any number of time steps.

    Each recurrent layer is wrapped in a `StatefulRecurrent` layer. A time axis (axis 1) has the
    static length None, in the returned model and in its stages.

    Args:
        model: A model with one input (rows, steps, …) and one output, see `BlockChain`.

    Raises:
        InvalidInput: The model has no recurrent layer, or a layer that is not recurrent combines
            several time steps.
    """
    chain = BlockChain(model)
    # The variable `plain` is a copy of the model without the settings of `compile`.
    plain = chain.part(0, len(chain))
    _, steps, *rest = plain.inputs[0].shape
    opened = keras.models.clone_model(
        plain,
        input_tensors=keras.Input((None, *rest), dtype=plain.inputs[0].dtype),
        clone_function=lambda layer: layer,
        call_function=_Caller(steps),
    )
    if not any(isinstance(layer, StatefulRecurrent) for layer in opened.layers):
        raise InvalidInput(
            "schedule='wavefront' is for recurrent models, and this one has no recurrent layer "
            f"({', '.join(kind.__name__ for kind in RECURRENT)}); use '1f1b' or 'gpipe'"
        )
    return opened


def is_open(tensor: keras.KerasTensor) -> bool:
    """Return whether axis 1 of a tensor in a model returned by `open_time` is the time axis."""
    return len(tensor.shape) > 1 and tensor.shape[1] is None


class _Caller:
    """Call layers on tensors with a time axis of any length; reject layers that mix time steps.

    Args:
        steps: Number of time steps of the whole sequence; None if the model does not fix this
            number.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps, self._carried = steps, set[int]()

    def __call__(
        self, layer: keras.Layer, *args: Argument, **kwargs: Argument
    ) -> keras.KerasTensor:
        # Each tensor carries its mask, so the mask arguments of a layer call are removed.
        kwargs = {name: value for name, value in kwargs.items() if "mask" not in name}
        values = keras.tree.flatten([args, kwargs])
        tensors = [x for x in values if isinstance(x, keras.KerasTensor)]
        opened = [is_open(x) for x in tensors]
        if not any(opened):
            return layer(*args, **kwargs)
        if not all(opened):
            raise _refusal(layer, "it combines a sequence with the output of the last step")
        if getattr(layer, "activity_regularizer", None) is not None:
            raise _refusal(layer, "its activity_regularizer counts all steps at once")
        if type(layer) in RECURRENT:
            return self._carry(layer, tensors)
        if type(layer) is Layers.Reshape:
            return self._reshape(layer, *args)
        reason = _not_each_step(layer, tensors[0])
        if reason:
            raise _refusal(layer, reason)
        return layer(*args, **kwargs)

    def _carry(self, layer: keras.Layer, tensors: list[keras.KerasTensor]) -> keras.KerasTensor:
        if len(tensors) > 1:
            raise _refusal(layer, "its initial state comes from the model, not from zeros")
        if id(layer) in self._carried:
            raise _refusal(layer, "it is used twice, and each use would need a separate state")
        self._carried.add(id(layer))
        for field in ("go_backwards", "stateful", "unroll", "return_state"):
            if getattr(layer, field):
                raise _refusal(layer, f"use {field}=False")
        for field in ("dropout", "recurrent_dropout"):
            if getattr(layer, field):
                raise _refusal(layer, f"its {field} uses one mask for all steps; use {field}=0")
        return StatefulRecurrent(layer)(*tensors)

    def _reshape(self, layer: keras.Layer, x: keras.KerasTensor) -> keras.KerasTensor:
        """Return the output of a Reshape layer, adapted so that it accepts any number of steps."""
        shape = layer.compute_output_shape((None, self._steps, *x.shape[2:]))
        if prod(shape[2:]) != prod(x.shape[2:]):
            raise _refusal(layer, "it changes the time axis")
        return Layers.Reshape((-1, *shape[2:]), name=layer.name)(x)


def _not_each_step(layer: keras.Layer, x: keras.KerasTensor) -> str | None:
    """Return how a layer combines time steps; None if it treats each time step separately."""
    if type(layer).__name__ in _MASKS:
        return None
    if type(layer) not in EACH_STEP:
        return "it may combine several steps"
    if type(layer) is Layers.Embedding:
        return None
    if len(x.shape) < 3:
        return "a step has no feature axis"
    axes = keras.tree.flatten(getattr(layer, "axis", -1))
    if any(axis % len(x.shape) < 2 for axis in axes):
        return f"axis={layer.axis} is not a feature axis"
    if type(layer) is Layers.TimeDistributed and layer.layer.non_trainable_weights:
        return f"{type(layer.layer).__name__} computes statistics over all steps"
    return None


def _refusal(layer: keras.Layer, reason: str) -> InvalidInput:
    return InvalidInput(
        f"layer {layer.name!r} ({type(layer).__name__}) does not fit schedule='wavefront': "
        f"{reason}; {ALLOWED}"
    )


# The type `States` contains a list of state tensors for each recurrent layer.
States: TypeAlias = list[list[tf.Tensor]]


class RecurrentStage(Stage):
    r"""A stage whose micro-batches are time segments; each continues from the previous state.

    Segment i has the input \(x_i\), the output \(y_i\) and the recurrent state \(h_i\). A stage
    computes \((y_i, h_i) = f(x_i, h_{i-1})\), and the initial state is \(h_{-1} = 0\). Backward
    passes run from the last segment to the first. The gradient of the loss with respect to the
    state is \(\partial L / \partial h_{i-1}\). The stage stores the gradient of the state for its
    next backward pass. The stage sends the gradient of the loss with respect to its input. The
    previous stage receives the input gradient \(\partial L / \partial x_i\). The gradients are
    those of back-propagation through all time steps of the sequence. The loss is the mean over rows
    and time steps. The weight of a segment is therefore its fraction of the time steps.

    If a recurrent layer returns only its last output, later layers run only in the last segment.
    Some segments of a sequence have no output. A stage receives no gradient for a segment without
    an output.

    TensorFlow traces segments of different lengths separately.

    Args:
        model: A part of the model that `open_time` returns.
        loss, first, recompute, read: Same arguments as those of `Stage`.
        stretches: Number of time segments of a sequence; the segments have the numbers 0 to
            stretches - 1.
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
        # A time segment without an output stops after the last recurrent layer. Without an output
        # of the segment, nothing reads the outputs of later layers.
        states = [node.outputs[0] for node in carried] or model.outputs
        self._body = keras.Model(model.inputs, states)
        # The attribute `_states` contains the state tensors at the end of the previous time
        # segment.
        self._states: States = []
        # The list `_state_gradients` contains gradients of the loss with respect to recurrent
        # states. The recurrent states are those after a time segment.
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
        # If only the last time segment has an output, its losses have weight 1. The weight 1 also
        # applies to the losses that layers add.
        counts = self._share(share if self._open else 1.0)
        compute: Compute = self._compute_outputs if answers else self._update_states
        with self.computing():
            begin = self._begin(number, as_list(x))
            arguments = as_list(x), begin, self._loss_targets(targets) if answers else None, counts
            self.own_loss, *results = self._run_forward(number, compute, *arguments)
        states = results[len(results) - len(tf.nest.flatten(begin)) :]
        # A time segment starts from the values of the previous segment's final states. The
        # TensorFlow graphs of different time segments are separate. A segment's backward pass
        # explicitly returns the gradient of the segment's initial states. The previous segment's
        # backward pass reads the gradient of these states.
        self._states = tf.nest.pack_sequence_as(begin, states)
        # No later segment reads the final state of the last time segment. The gradient of the last
        # segment's final state is therefore zero.
        if number == self._last:
            self._state_gradients = [tf.zeros_like(state) for state in states]
        return unwrap_single(results[: len(results) - len(states)]) if answers else None

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """Return the gradient with respect to each input; None for inputs without a gradient.

        Args:
            number: Number of the segment; segments run from last to first.
            gradient: Gradient with respect to the output. The gradient is None at the last stage
                and for segments without an output.
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
