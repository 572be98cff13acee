"""A recurrent model whose time axis has no fixed length, for time segments of any length."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.model_parallel.stages.model_blocks import BlockChain

Shape: TypeAlias = tuple[int | None, ...]
# Arguments of layer calls: nested structures of tensors and Python values.
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
# Embedding and Masking layers compute their masks with these operations, separately for each time
# step.
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
        # `return_state` is reset to False afterwards, because the whole model calls the same layer
        # object.
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

        At a masked time step, Keras repeats the previous output; before the first unmasked time
        step of a call, it returns zeros.
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

    Each recurrent layer is wrapped in a `StatefulRecurrent` layer. If axis 1 of a tensor is time,
    its length is None, also in stages cut from the returned model.

    Args:
        model: A model with one input (rows, steps, …) and one output, see `BlockChain`.

    Raises:
        InvalidInput: If there is no recurrent layer, or if a layer that is not recurrent combines
            several time steps.
    """
    chain = BlockChain(model)
    plain = chain.part(0, len(chain))  # a copy that is not compiled (`compile`)
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
        # Masks are attached to their tensors, so mask arguments are removed.
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
    """Return why a layer does not treat each time step separately; None if it does."""
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
