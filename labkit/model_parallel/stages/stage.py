"""A pipeline stage: its forward and backward passes, and the tensors saved between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.model_parallel.functional import Nest, attach_mask, is_masked, mask_of
from labkit.model_parallel.losses import LossTargets, Weighted
from labkit.model_parallel.stages.compiled import Compiled, Compute, Computed, Specs, Values
from labkit.model_parallel.stages.footprint import MemoryLedger
from labkit.schedules.pipeline import time_segments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf


Rows: TypeAlias = "tf.Tensor | npt.NDArray[np.generic]"


class Batch(NamedTuple):
    """Inputs, targets and sample weights (or None), with one row per sample.

    x is a list if there are several inputs; targets and weights are nested as Keras expects.
    """

    x: Rows | list[Rows]
    y: Nest
    weight: Nest | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return len(keras.tree.flatten(self.x)[0])


class MicroBatches:
    """A batch divided into micro-batches of consecutive rows.

    Args:
        batch: The batch to divide.
        count: Number of micro-batches; their sizes differ by at most one row, and some may be
            empty.
    """

    def __init__(self, batch: Batch, count: int) -> None:
        self._x, self._y, self._weight = batch
        self._rows, self._edges = batch.rows, cut(batch.rows, [1.0] * count)

    def rows(self, number: int) -> int:
        """Return the number of rows of a micro-batch."""
        return self._edges[number + 1] - self._edges[number]

    def share(self, number: int) -> float:
        """Return the weight of a micro-batch, which is its fraction of the batch's rows."""
        return self.rows(number) / self._rows

    def reaches(self, number: int, stage: int) -> bool:
        """Return whether a stage receives any data of a micro-batch."""
        return self.rows(number) > 0

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Return the lengths of the first axes of a stage's input for a micro-batch."""
        return (self.rows(number),)

    def input(self, number: int) -> Nest:
        """Return the inputs of a micro-batch."""
        return self._part(self._x, number)

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Return the targets and sample weights of a micro-batch, which the last stage needs."""
        return self._part(self._y, number), self._part(self._weight, number)

    def loss_targets(self, masks: Sequence[Rows | None]) -> tuple[list[LossTargets], list[float]]:
        """Return `LossTargets` and the weight of each micro-batch that has an output."""
        numbers = range(len(self._edges) - 1)
        parts = [[self._part(mask, n) for mask in masks] for n in numbers]
        targets = [LossTargets(*self.targets(n), parts[n], self._steps_of(n)) for n in numbers]
        return targets, [self.share(n) for n in numbers]

    def _steps_of(self, number: int) -> int | None:
        """Return the number of time steps of a micro-batch; None if it has all time steps."""
        return None

    def _part(self, value: Nest | None, number: int) -> Nest | None:
        rows = slice(self._edges[number], self._edges[number + 1])
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], value)


class TimeSegments(MicroBatches):
    """A batch of sequences divided into segments of time steps; each segment contains all rows.

    Args:
        batch: A batch with inputs (rows, steps, …). Sample weights have shape (rows, steps) or
            (rows, 1). If the model has one output per sequence, shape (rows,) is also allowed.
        count: Number of segments; their lengths differ by at most one step.
        opened: One flag per stage, which tells whether the stage's input is a sequence. The last
            element of `opened` describes the model's output. Between stages, tensors that are not
            sequences are sent only for the last segment.

    Raises:
        InvalidInput: The batch has fewer time steps than segments. The error also occurs if the
            targets lack a value per time step. The error also occurs if the sample weights have a
            wrong shape.
    """

    def __init__(self, batch: Batch, count: int, opened: Sequence[bool]) -> None:
        # Only models with one input and one output can be divided by time. The batch has one input
        # and one target.
        x: tf.Tensor = batch.x
        y: tf.Tensor = batch.y
        weight: tf.Tensor = batch.weight
        self._x, self._y, self._weight, self._opened = x, y, weight, opened
        self._edges = time_segments(x.shape[1], count)
        self._steps, self._last = x.shape[1], count - 1
        if opened[-1] and (len(y.shape) < 2 or y.shape[1] != self._steps):
            raise InvalidInput(
                f"the model has an output for each of {self._steps} steps, but targets have shape "
                f"{[None, *y.shape[1:]]}; give one target per step, or set "
                "return_sequences=False in the last recurrent layer"
            )
        if opened[-1] and weight is not None and len(weight.shape) < 2:
            raise InvalidInput(
                "sample weights of shape [None] would weight time steps, not rows, because the "
                "model has an output for each step; give shape [None, 1], or one weight per step"
            )

    def rows(self, number: int) -> int:
        """Return the number of rows of a segment, which equals the number of rows of the batch."""
        return len(self._x)

    def share(self, number: int) -> float:
        """Return the weight of a segment, which is its fraction of the time steps."""
        return self._length(number) / float(self._steps)

    def reaches(self, number: int, stage: int) -> bool:
        """Return whether a stage receives any data of a segment."""
        return len(self._x) > 0 and (self._opened[stage] or number == self._last)

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Return a stage's input size: (rows,), or (rows, steps) if the input is a sequence."""
        return (len(self._x), *([self._length(number)] if self._opened[stage] else []))

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Return the targets of a segment, or all targets if the output has no time axis."""
        y: tf.Tensor = self._y
        weight: tf.Tensor = self._weight
        if self._opened[-1]:
            y = self._part(y, number)
            if weight is not None and weight.shape[1:2] == (self._steps,):
                weight = self._part(weight, number)
        return y, weight

    def loss_targets(self, masks: Sequence[Rows | None]) -> tuple[list[LossTargets], list[float]]:
        """Return the targets and the weight of each segment for which the model has an output."""
        if self._opened[-1]:
            return super().loss_targets(masks)
        return [LossTargets(self._y, self._weight, masks)], [1.0]

    def _steps_of(self, number: int) -> int:
        return self._length(number)

    def _length(self, number: int) -> int:
        return self._edges[number + 1] - self._edges[number]

    def _part(self, value: Rows | None, number: int) -> Rows | None:
        edges = slice(self._edges[number], self._edges[number + 1])
        return None if value is None else value[:, edges]


# The type `Loss` is a function of targets, predictions and weights.
Loss: TypeAlias = Callable[..., tf.Tensor]
# The type `Targets` is a pair of targets and sample weights.
Targets: TypeAlias = "tuple[Nest, Nest | Weighted | None]"
# The type `Given` describes arguments in nested lists; None marks a missing argument.
Given: TypeAlias = "Rows | Sequence[Given] | None"
# The type `Passed` contains the inputs or outputs of a model. A value of type `Passed` is one
# tensor or a list of tensors.
Passed: TypeAlias = "Rows | Sequence[Rows | None] | None"


class Stage:
    r"""A part of a model, with the saved activations of the micro-batches that are in flight.

    A single input or output is a tensor; several inputs or outputs form a list of tensors. Only
    floating-point tensors have gradients; masks and integers are only sent forward.

    A stage computes the gradients of its objective \(\langle y, \bar y \rangle\). The stage's
    output is y, and the next stage sends the gradient \(\bar y\). The objective of the last stage
    is the loss. The objective of each stage also includes the losses that the stage's layers add.
    Gradients of micro-batches are summed. During the forward pass, the stage saves all tensors that
    the backward pass reads, including weights. The optimizer may change weights before the backward
    pass, because the backward pass reads saved weights.

    The forward pass, the backward pass and its two parts are functions of one graph (see
    `Compiled`). TensorFlow traces the graph of a stage once for any number of rows.

    Args:
        model: The part of the whole model that the stage computes, see `Blocks.part`.
        loss: Function of (targets, predictions, sample weights) if this is the last stage;
            otherwise None.
        first: Whether this is the first stage of the model, whose inputs need no gradients.
        recompute: Whether to save only the input, and to repeat the forward pass before the
            backward pass.
        read: For each input, whether it comes from the batch and thus needs no gradient. If `read`
            is None, the value of `first` is used for all inputs.

    Attributes:
        variables: Trainable weights of the stage.
        max_in_flight: Maximum number of micro-batches that were in flight at one time.
        own_loss: Losses that the stage's layers add in the latest forward pass, multiplied by the
            micro-batch's share. `own_loss` is None if no layer adds losses. At the last stage,
            `own_loss` is None because the loss includes the layers' losses.
        ledger: Counter of the bytes of saved tensors (`MemoryLedger`).
        computing: Function that returns a context manager for each forward or backward pass, see
            `labkit.communicator.clock`.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Loss | None = None,
        first: bool = False,
        recompute: bool = False,
        read: Sequence[bool] | None = None,
    ) -> None:
        self.model, self._loss, self._first, self._recompute = model, loss, first, recompute
        from_batch = [first] * len(model.inputs) if read is None else read
        pairs = zip(model.inputs, from_batch, strict=True)
        self._needs_gradient = [is_number(x) and not is_read for x, is_read in pairs]
        self._has_gradient = [] if loss is not None else [is_number(y) for y in model.outputs]
        self.variables = list(model.trainable_variables)
        self._all, trained = list(model.variables), {id(variable) for variable in self.variables}
        # With recomputation, `_state` lists the variables of dropout and normalisation layers. The
        # stage restores the variables in `_state` before a second forward pass.
        self._state = [v for v in self._all if recompute and id(v) not in trained]
        # `_compiled` contains one entry per combination of argument shapes, dtypes and missing
        # arguments.
        self._compiled: dict[tuple[Hashable, ...], Compiled] = {}
        # Several micro-batches are in flight, and the schedule defines their order. The keys of
        # `_saved` are therefore micro-batch numbers.
        self._saved: dict[int, tuple[Compiled, Values]] = {}
        # For each micro-batch, `_recompute_inputs` contains the arguments and variable values for a
        # second forward pass.
        self._recompute_inputs: dict[int, tuple[Compiled, list[tf.Tensor], list[tf.Tensor]]] = {}
        # `_pending_weight_parts` contains the backward passes whose weight gradients are not yet
        # computed.
        self._pending_weight_parts: dict[int, tuple[Compiled, Values]] = {}
        self._gradients: list[tf.Tensor] | None = None
        self.max_in_flight = 0
        self.own_loss: tf.Tensor | None = None
        self.ledger = MemoryLedger()
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(
        self, number: int, x: Passed, share: float, targets: Targets | None = None
    ) -> Passed:
        """Return the output of a micro-batch; the last stage returns its part of the loss instead.

        Args:
            number: Number of the micro-batch.
            x: Input of the micro-batch at this stage.
            share: Weight of the losses, which is the micro-batch's fraction of the batch.
            targets: Pair (targets, sample weights), used at the last stage.
        """
        with self.computing():
            arguments = as_list(x), self._loss_targets(targets), self._share(share)
            self.own_loss, *found = self._run_forward(number, self._compute, *arguments)
        return unwrap_single(found)

    def backward(self, number: int, gradient: Passed, weights_later: bool = False) -> Passed:
        """Return the gradient with respect to each input; None for inputs without a gradient.

        Args:
            number: Number of the micro-batch.
            gradient: Gradient with respect to the output; None at the last stage.
            weights_later: Whether to leave the weight gradients to `backward_weight`.
        """
        with self.computing():
            compiled, saved = self._restore(number)
            seeds = self._seeds(gradient)
            if weights_later:
                dx, rest = compiled.backward_input(saved, seeds)
                self._pending_weight_parts[number] = compiled, rest
                self.ledger.keep(self, number, rest.values(), self._all)
            else:
                dx, dw = compiled.backward(saved, seeds)
                self._add(number, dw)
        return self._returns(dx)

    def backward_weight(self, number: int) -> None:
        """Compute and add the weight gradients that `backward` omitted for a micro-batch."""
        with self.computing():
            compiled, rest = self._pending_weight_parts.pop(number)
            self._add(number, compiled.backward_weight(rest))

    def take_gradients(self) -> list[tf.Tensor]:
        """Return and reset the gradients summed since the last call, one tensor per variable."""
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return [tf.zeros_like(variable.value) for variable in self.variables]
        return gradients

    def _run_forward(self, number: int, compute: Compute, *values: Given) -> list[tf.Tensor | None]:
        """Run the forward pass, save data for the backward pass, and return the results."""
        arguments = [_tensor(value) for value in tf.nest.flatten(values) if value is not None]
        compiled = self._compiled_for(compute, values, arguments)
        state = [tf.identity(variable.value) for variable in self._state]
        results, saved = compiled.forward(arguments)
        tensors = list(saved.values())
        # With recomputation, only the local variable `saved` refers to the saved tensors. With
        # recomputation, the saved tensors are freed when `_run_forward` returns.
        if self._recompute:
            self._recompute_inputs[number] = compiled, arguments, state
            tensors = [*arguments, *state]
        else:
            self._saved[number] = compiled, saved
        self.ledger.keep(self, number, tensors, self._all)
        self.max_in_flight = max(self.max_in_flight, len(self._saved) + len(self._recompute_inputs))
        return results

    def _restore(self, number: int) -> tuple[Compiled, Values]:
        """Return the saved or recomputed tensors that the backward pass reads."""
        if not self._recompute:
            return self._saved.pop(number)
        compiled, arguments, state = self._recompute_inputs.pop(number)
        # Since the first forward pass, other micro-batches may have modified the layers' statistics
        # and random seeds. The second forward pass starts from the saved statistics and random
        # seeds. After the second forward pass, the current statistics and seeds are restored.
        now = [tf.identity(variable.value) for variable in self._state]
        self._set_state(state)
        _, saved = compiled.forward(arguments)
        self._set_state(now)
        self.ledger.keep(self, number, saved.values(), self._all)
        return compiled, saved

    def _set_state(self, state: list[tf.Tensor]) -> None:
        for variable, value in zip(self._state, state, strict=True):
            variable.assign(value)

    def _compiled_for(
        self, compute: Compute, arguments: tuple[Given, ...], tensors: list[tf.Tensor]
    ) -> Compiled:
        """Return the compiled computation for the arguments' shapes and dtypes."""
        present = tuple(value is not None for value in tf.nest.flatten(arguments))
        key = compute, present, *((x.dtype, *x.shape[1:]) for x in tensors)
        if key not in self._compiled:
            rest = iter(tensors)
            specs = [_spec(next(rest)) if exists else None for exists in present]
            nest = tf.nest.pack_sequence_as(arguments, specs)
            self._compiled[key] = Compiled(compute, nest, self._inputs, self.variables)
        return self._compiled[key]

    def _inputs(self, x: Sequence[tf.Tensor], *others: Given) -> list[tf.Tensor]:
        return [value for value, needed in zip(x, self._needs_gradient, strict=True) if needed]

    def _seeds(self, gradient: Passed) -> list[tf.Tensor]:
        """Return the gradients of only those outputs that can have a gradient."""
        pairs = (
            zip(as_list(gradient), self._has_gradient, strict=True) if self._has_gradient else ()
        )
        return [value for value, has_gradient in pairs if has_gradient]

    def _returns(self, dx: Sequence[tf.Tensor]) -> Passed:
        gradients = iter(dx)
        return unwrap_single(
            [next(gradients) if needed else None for needed in self._needs_gradient]
        )

    def _share(self, share: float) -> tf.Tensor:
        # The weight `share` has the same float type as the losses. TensorFlow would convert a
        # Python number to the type float32.
        return tf.constant(share, keras.config.floatx())

    def _loss_targets(self, targets: Targets | None) -> Targets | None:
        return None if self._loss is None else targets

    def _compute(
        self, x: Sequence[tf.Tensor], targets: Targets | None, share: tf.Tensor
    ) -> Computed:
        y = call_with_masks(self.model, x, training=True)
        objective = self._objective(y, targets, share)
        # Only a stage without the loss needs gradients of its outputs, which later stages send.
        if self._loss is not None:
            return [None, objective], [], objective
        outputs = keras.tree.flatten(y)
        ends = [
            tensor for tensor, exists in zip(outputs, self._has_gradient, strict=True) if exists
        ]
        return [objective if self.model.losses else None, *outputs], ends, objective

    def _objective(self, y: tf.Tensor, targets: Targets | None, share: tf.Tensor) -> tf.Tensor:
        """Return the losses that layers add plus, at the last stage, the loss of the outputs."""
        parts = list(self.model.losses)
        if self._loss is not None and targets is not None:
            parts.append(self._loss(targets[0], y, targets[1]))
        # Under a mixed-precision policy, losses have several dtypes, so all are cast to Keras's
        # default float type.
        objective = tf.zeros((), share.dtype)
        for part in parts:
            objective += tf.cast(part, share.dtype)
        return objective * share

    def _add(self, number: int, gradients: list[tf.Tensor]) -> None:
        if self._gradients is not None:
            gradients = [a + b for a, b in zip(self._gradients, gradients, strict=True)]
        self._gradients = gradients
        self.ledger.gather(self, gradients)
        self.ledger.drop(self, number)


def call_with_masks(model: keras.Model, x: Sequence[tf.Tensor], training: bool) -> Nest:
    """Return a model part's outputs, with the masks that they have in the whole model."""
    places = {id(spec): value for spec, value in zip(model.inputs, x, strict=True)}
    for spec, value in zip(model.inputs, x, strict=True):
        attach_mask(value, places.get(id(mask_of(spec))))
    y = model(unwrap_single(x), training=training)
    for spec, value in zip(model.outputs, keras.tree.flatten(y), strict=True):
        # Unlike a layer, a Keras model attaches its input's mask to an output that has no mask.
        if not is_masked(spec):
            attach_mask(value, None)
    return y


def is_number(tensor: keras.KerasTensor) -> bool:
    """Return whether a tensor has a floating-point dtype and can therefore have a gradient."""
    return "float" in tensor.dtype


def as_list(passed: Passed) -> list[Rows | None]:
    """Return one or several tensors as a list."""
    return list(passed) if isinstance(passed, list | tuple) else [passed]


def unwrap_single(tensors: Sequence[Rows | None]) -> Passed:
    """Return one tensor without a list, and several tensors as a list, as Keras does."""
    return tensors[0] if len(tensors) == 1 else list(tensors)


def _tensor(value: Rows) -> tf.Tensor:
    return value if isinstance(value, tf.Tensor) else tf.convert_to_tensor(value)


def _spec(tensor: tf.Tensor) -> Specs:
    """Return the shape and dtype of a tensor, with an unknown number of rows."""
    shape = [None, *tensor.shape[1:]] if tensor.shape.rank else []
    return tf.TensorSpec(shape, tensor.dtype)
