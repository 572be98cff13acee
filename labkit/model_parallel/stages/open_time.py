"""A recurrent model in which time is open: any stretch of steps goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.model_parallel.stages.model_blocks import Chain

Shape: TypeAlias = tuple[int | None, ...]
# What layers are called on: a nest of tensors, and plain values.
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
_MASKS = ("NotEqual", "Any")  # operations by which Embedding and Masking make them, step by step
ALLOWED = (
    f"allowed are {', '.join(kind.__name__ for kind in RECURRENT)}, and layers that act on each "
    f"step alone: {', '.join(kind.__name__ for kind in EACH_STEP)}; behind a recurrent layer with "
    "return_sequences=False any layer"
)


class Carried(keras.layers.Layer):
    """A recurrent layer that goes on from a given state, and leaves its last one.

    Attributes:
        begin: the state before the first step; None: zeros.
        end: the state behind the last step of the latest call.
    """

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__(name=layer.name, dtype=layer.dtype_policy, trainable=layer.trainable)
        self.layer, self.built = layer, True
        self.begin: list[tf.Tensor] | None = None
        self.end: list[tf.Tensor] = []

    def call(self, x: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        """The outputs of the layer."""
        # Set for this call alone: the layer belongs to the whole model, too, where others call it.
        self.layer.return_state = True
        try:
            y, *self.end = self.layer(x, initial_state=self.begin, mask=mask)
        finally:
            self.layer.return_state = False
        if mask is None or self.begin is None or self.layer.zero_output_for_mask:
            return y
        # Of all kinds of cells the first state is the output.
        return self._held(y, mask, self.begin[0])

    def compute_mask(self, x: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor | None:
        """As the layer's."""
        return self.layer.compute_mask(x, mask)

    def _held(self, y: tf.Tensor, mask: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        """Outputs with that of the stretch before where no step of this one counts so far.

        A masked step repeats the output before it; the first one of a stretch finds zeros there.
        """
        if not self.layer.return_sequences:
            return tf.where(tf.reduce_any(mask, axis=1)[:, None], y, before)
        seen = tf.cumsum(tf.cast(mask, tf.int32), axis=1) > 0
        return tf.where(seen[..., None], y, before[:, None])

    def compute_output_shape(self, shape: Shape) -> Shape:
        """As the layer's."""
        found: Shape = self.layer.compute_output_shape(shape)
        return found


def open_time(model: keras.Model) -> keras.Model:
    """The same layers on an input with any number of steps, as a `keras.Model`.

    Recurrent layers become `Carried`. Axis 1 of a tensor is None where it is time, also in the
    stages into which the result is cut.

    Args:
        model: a chain (see `Chain`) of inputs (rows, steps, …).

    Raises:
        InvalidInput: no recurrent layer, or a layer that looks at other steps in another way.
    """
    chain = Chain(model)
    plain = chain.part(0, len(chain))  # never compiled, whatever the model is
    _, steps, *rest = plain.inputs[0].shape
    opened = keras.models.clone_model(
        plain,
        input_tensors=keras.Input((None, *rest), dtype=plain.inputs[0].dtype),
        clone_function=lambda layer: layer,
        call_function=_Caller(steps),
    )
    if not any(isinstance(layer, Carried) for layer in opened.layers):
        raise InvalidInput(
            "schedule='wavefront' is for recurrent models, and this one has no recurrent layer "
            f"({', '.join(kind.__name__ for kind in RECURRENT)}); use '1f1b' or 'gpipe'"
        )
    return opened


def is_open(tensor: keras.KerasTensor) -> bool:
    """Whether axis 1 of an opened model's tensor is time."""
    return len(tensor.shape) > 1 and tensor.shape[1] is None


class _Caller:
    """Calls each layer on tensors whose time is open, or says why it cannot be.

    Args:
        steps: of the whole sequence; None where the model leaves that open.
    """

    def __init__(self, steps: int | None) -> None:
        self._steps, self._carried = steps, set[int]()

    def __call__(
        self, layer: keras.Layer, *args: Argument, **kwargs: Argument
    ) -> keras.KerasTensor:
        # A mask comes again with the tensor that it is attached to.
        kwargs = {name: given for name, given in kwargs.items() if "mask" not in name}
        given = keras.tree.flatten([args, kwargs])
        tensors = [each for each in given if isinstance(each, keras.KerasTensor)]
        opened = [is_open(x) for x in tensors]
        if not any(opened):
            return layer(*args, **kwargs)
        if not all(opened):
            raise _refusal(layer, "it joins a sequence with what comes behind the last step")
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
            raise _refusal(layer, "its first state comes from the model, not from zeros")
        if id(layer) in self._carried:
            raise _refusal(layer, "it is used twice, and each use would want a state of its own")
        self._carried.add(id(layer))
        for field in ("go_backwards", "stateful", "unroll", "return_state"):
            if getattr(layer, field):
                raise _refusal(layer, f"use {field}=False")
        for field in ("dropout", "recurrent_dropout"):
            if getattr(layer, field):
                raise _refusal(layer, f"its {field} has one mask for all steps; use {field}=0")
        return Carried(layer)(*tensors)

    def _reshape(self, layer: keras.Layer, x: keras.KerasTensor) -> keras.KerasTensor:
        """Its target may hold the number of steps of the whole sequence; here it is any."""
        found = layer.compute_output_shape((None, self._steps, *x.shape[2:]))
        if prod(found[2:]) != prod(x.shape[2:]):
            raise _refusal(layer, "it does not leave the axis of time alone")
        return Layers.Reshape((-1, *found[2:]), name=layer.name)(x)


def _not_each_step(layer: keras.Layer, x: keras.KerasTensor) -> str | None:
    """Why a layer does not act on each step alone; None: it does."""
    if type(layer).__name__ in _MASKS:
        return None
    if type(layer) not in EACH_STEP:
        return "it may look at several steps"
    if type(layer) is Layers.Embedding:
        return None
    if len(x.shape) < 3:
        return "a step has no axis of features"
    axes = keras.tree.flatten(getattr(layer, "axis", -1))
    if any(axis % len(x.shape) < 2 for axis in axes):
        return f"axis={layer.axis} is not one of features"
    if type(layer) is Layers.TimeDistributed and layer.layer.non_trainable_weights:
        return f"{type(layer.layer).__name__} has statistics of all steps"
    return None


def _refusal(layer: keras.Layer, reason: str) -> InvalidInput:
    return InvalidInput(
        f"layer {layer.name!r} ({type(layer).__name__}) does not fit schedule='wavefront': "
        f"{reason}; {ALLOWED}"
    )
