"""Losses of parts of a batch, weighted so that their sum equals the loss that Keras computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.model_parallel.functional import (
    Nest,
    attach_mask,
    functional_of,
    is_masked,
    leaves,
    mask_of,
    reject_lost_masks,
)

if TYPE_CHECKING:
    from keras.src.models.functional import Functional

Counts: TypeAlias = "npt.NDArray[np.float64] | None"
# The type `Weighted` pairs sample weights with the weights of the losses.
Weighted: TypeAlias = "tuple[Nest, tf.Tensor | None]"
# The type `LossCall` is a function of a loss, targets, predictions and sample weights that returns
# a scalar.
LossCall: TypeAlias = Callable[[keras.Loss, tf.Tensor, tf.Tensor, tf.Tensor | None], tf.Tensor]
_MEANS = ("sum_over_batch_size", "mean")
# In a Circle loss, the value of a sample depends on pairs of samples in the batch.
_OF_BATCH = (keras.losses.Circle,)


class LossTargets(NamedTuple):
    """Targets, sample weights (or None) and prediction masks of some rows of a batch.

    `steps` is the number of time steps, or None for complete rows.
    """

    y: Nest
    weight: Nest
    masks: Sequence[tf.Tensor | None] = ()
    steps: int | None = None


class Losses:
    r"""The loss of a batch as the sum of the losses of its parts.

    A Keras loss has values \(l_k\), weights \(w_k\) and a divisor D. The loss is \(L = \frac{1}{D}
    \sum_k w_k l_k\) over all unmasked values k. The reduction of a Keras loss determines its
    divisor D. The divisor D counts the values, sums their weights, or is 1. The batch is divided
    into parts i with losses \(L_i\) and divisors \(D_i\). The loss of the batch is \(L = \sum_i
    \frac{D_i}{D} L_i\). The divisor \(D_i\) may be proportional to the number of rows in part i.
    Each part i is then weighted by its number of rows. Some divisors \(D_i\) are not proportional
    to the number of rows. Without proportional divisors, the ranks first sum the divisors of all
    parts to D. The sum of the divisors depends on targets, sample weights, and masks. The masks are
    computed from the inputs of the model.

    Args:
        model: The whole model, after `compile`.
        readers: Communicator of the ranks that divide the batch; the loss covers the rows of the
            whole batch.
        parts: Number of parts into which each rank divides its rows.

    Raises:
        InvalidInput: A loss function returns no scalar, or a mask depends on weights.
    """

    def __init__(self, model: keras.Model, readers: Communicator, parts: int) -> None:
        self._graph, self._readers = functional_of(model), readers
        self._single_part = parts == readers.size == 1
        # The Keras object `model._compile_loss` assigns a target and a prediction to each loss.
        loss = model._compile_loss
        kind, weights = type(loss), loss._user_loss_weights
        self._compiled = kind(loss._user_loss, weights, output_names=loss.output_names)
        # The attribute `_by_rows` states whether row counts determine the weights of batch parts.
        # Before the first batch, the attribute `_by_rows` is None.
        self._by_rows: bool | None = None
        # For each loss, the list `_sums` states whether the loss is a sum without a divisor.
        self._sums: list[bool] = []
        self._masking = None if self._single_part else _masking(self._graph)

    def __call__(self, y: Nest, predicted: Nest, weight: Weighted) -> tf.Tensor:
        """Return the loss of one part of a batch.

        Args:
            y: Targets.
            predicted: Outputs of the model for this part of the batch, with their masks.
            weight: Pair of sample weights and the result of `counts` for this part of the batch.
        """
        samples, counts = weight

        def counted(number: int, loss: keras.Loss, *arguments: tf.Tensor | None) -> tf.Tensor:
            value = loss(*arguments)
            return value if counts is None else value * tf.cast(counts[number], value.dtype)

        return self._total(counted, y, predicted, samples)

    def masks(self, x: Nest) -> list[tf.Tensor | None]:
        """Return the masks of the model's outputs for a batch, computed from the inputs alone."""
        masks = iter([] if self._masking is None else self._masking(leaves(self._graph, x)))
        return [next(masks, None) if is_masked(output) else None for output in self._graph.outputs]

    def counts(self, parts: Sequence[LossTargets], shares: Sequence[float]) -> list[Counts]:
        """Return the weight of each part in each loss, divided by the part's factor in `shares`.

        A weight of None means that the number of rows determines the part's weight.

        Args:
            parts: `LossTargets` of the parts into which this rank's rows are divided.
            shares: Factors, one per part, by which the caller multiplies the losses of the parts.
        """
        if self._by_rows is None:
            divisors = self._divisors(parts[0], 1)
            self._by_rows = all(divisor.by_rows for divisor in divisors)
            self._sums = [divisor.sums for divisor in divisors]
        if self._single_part or self._by_rows:
            return [None] * len(parts)
        local = np.array([[float(d.value) for d in self._divisors(part)] for part in parts])
        rows = sum(map(_rows, parts))
        total, *totals = self._readers.allreduce_small(
            np.array([rows, *local.sum(axis=0)]), "a loss's parts"
        )
        divisor = np.where(np.logical_or(self._sums, np.array(totals) <= 0), 1.0, totals)
        # After the backward pass, the gradients are averaged over the ranks. The weight of a rank
        # in the average is its number of rows. The factor `total / rows` cancels the weighting of
        # ranks by their numbers of rows.
        units = total / max(rows, 1) / divisor
        return [
            row * units / share if share else None for row, share in zip(local, shares, strict=True)
        ]

    def _divisors(self, part: LossTargets, rows: int | None = None) -> list[Divisor]:
        """Return the divisor of each loss for a part of a batch, or for its first `rows` rows."""
        divisors: list[Divisor] = []

        def record(number: int, loss: keras.Loss, *arguments: tf.Tensor | None) -> tf.Tensor:
            divisors.append(Divisor(loss, *arguments))
            return tf.zeros(())

        of = part.y, part.weight, list(part.masks)
        y, weight, masks = keras.tree.map_structure(lambda each: _first(each, rows), of)
        flat = keras.tree.flatten(y)
        specs = self._graph.outputs
        like = flat if len(flat) == len(specs) else flat[:1] * len(specs)
        masks = masks or [None] * len(specs)
        blank = [
            attach_mask(_zeros(spec, each, part.steps), mask)
            for spec, each, mask in zip(specs, like, masks, strict=True)
        ]
        self._total(record, y, nested(self._graph, blank), weight)
        return divisors

    def _total(
        self, each: LossCall, y: Nest, predicted: Nest, samples: tf.Tensor | None
    ) -> tf.Tensor:
        """Return Keras's sum of losses, in which `each` computes each loss."""
        compiled = self._compiled
        if not compiled.built:
            compiled(y, predicted, samples)
            # The entries None prevent Keras from updating the metrics of the losses.
            compiled.metrics[:] = [None] * len(compiled.metrics)
        return with_loss_function(compiled, each, lambda: compiled(y, predicted, samples))


def with_loss_function(
    compiled: keras.Loss, loss_function: LossCall, call: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """Return Keras's sum of losses, in which `loss_function` computes each loss.

    Args:
        compiled: Keras object that sums the losses of a compiled model.
        loss_function: Function that returns the value of one loss. Its arguments are the number of
            the loss, the loss, the targets, the predictions and the sample weights.
        call: Function without arguments that calls `compiled` and returns the result.
    """
    original = compiled._flat_losses
    compiled._flat_losses = [
        entry._replace(loss=partial(loss_function, number, entry.loss))
        for number, entry in enumerate(original)
    ]
    try:
        return call()
    finally:
        compiled._flat_losses = original


def build_losses(compiled: keras.Loss, call: Callable[[], tf.Tensor]) -> None:
    """Trace the Keras loss once, so that it assigns outputs to losses without updating metrics."""
    # The code traces the loss instead of calling it, because a real call would update Keras
    # metrics.
    if not compiled.built:
        tf.function(call, autograph=False).get_concrete_function()


class WholeLosses:
    """The mean loss over batches whose rows are divided among several ranks."""

    def __init__(self) -> None:
        # The dict `_parts` maps a batch number to an array. The array contains the row count, then
        # the numerator and divisor of each loss.
        self._parts: dict[int, np.ndarray] = {}
        self._weights: list[float] = []

    def add(
        self, batch: int, compiled: keras.Loss, y: Nest, predicted: Nest, weight: Nest, rows: int
    ) -> None:
        """Record the losses of one part of a batch, and update Keras's metrics with this part.

        Args:
            batch: Number of the batch, equal on all ranks.
            compiled: Keras object that sums the losses of a compiled model.
            y, predicted, weight: Targets, predictions and sample weights of the part of the batch,
                as Keras expects them.
            rows: Number of rows in this part of the batch.
        """
        sums: list[float] = [rows]

        def record(_: int, loss: keras.Loss, *arguments: tf.Tensor | None) -> tf.Tensor:
            value, divisor = loss(*arguments), Divisor(loss, *arguments)
            count = float(divisor.value)
            sums.extend([float(value) * count, 0.0 if divisor.sums else count])
            return value

        build_losses(compiled, lambda: compiled(y, predicted, weight))
        with_loss_function(compiled, record, lambda: compiled(y, predicted, weight))
        self._parts[batch] = np.array(sums)
        weights = [entry.loss_weights for entry in compiled._flat_losses]
        self._weights = [1.0 if record is None else float(record) for record in weights]

    def mean(self, communicator: Communicator) -> float:
        """Return the mean loss over the rows of all batches, as a collective call."""
        results = communicator.allgather(
            (self._parts, self._weights), "the losses of the parts of batches"
        )
        weights = np.array(max((weights_of_rank for _, weights_of_rank in results), key=len))
        batches: dict[int, np.ndarray] = {}
        for number, part in (pair for parts, _ in results for pair in parts.items()):
            batches[number] = batches.get(number, 0.0) + part
        rows = np.array([part[0] for part in batches.values()])
        numerators = np.array([part[1::2] for part in batches.values()])
        divisors = np.array([part[2::2] for part in batches.values()])
        # For a loss that is a plain sum, the recorded divisor 0 is replaced by the divisor 1.
        losses = numerators / np.where(divisors == 0, 1.0, divisors)
        return float(rows @ losses @ weights / rows.sum())


def nested(graph: Functional, outputs: Sequence[tf.Tensor]) -> Nest:
    """Return the output tensors in the nested structure that the Keras model returns."""
    return (
        outputs[0]
        if len(outputs) == 1
        else keras.tree.pack_sequence_as(graph._outputs_struct, outputs)
    )


class Divisor(keras.losses.Loss):
    """The divisor of a Keras loss, computed from loss values that are all 1.

    Args:
        loss: A Keras loss.
        y, predicted, weight: Targets, predictions and sample weights of some rows. The values of
            the predictions do not matter, only their shape and mask.

    Attributes:
        value: Divisor of the loss; 1 if the loss is a sum.
        sums: Whether the loss is a plain sum, without a divisor.
        by_rows: Whether the divisor is proportional to the number of rows.
        of_batch: Whether the loss is defined only for a whole batch. A loss of a whole batch is
            treated as a mean over rows.

    Raises:
        InvalidInput: The loss returns a value for each sample.
    """

    def __init__(
        self, loss: keras.Loss, y: tf.Tensor, predicted: tf.Tensor, weight: tf.Tensor | None
    ) -> None:
        if loss.reduction in (None, "none"):
            raise InvalidInput(
                f"loss {loss.name!r} has reduction={loss.reduction!r}, which returns a value "
                "per sample, but training in parts needs a scalar; use 'sum' or "
                "'sum_over_batch_size'"
            )
        super().__init__(loss.name, "sum", loss.dtype)
        self._loss, self.sums = loss, loss.reduction == "sum"
        self.by_rows = loss.reduction in _MEANS and not is_masked(predicted)
        self.of_batch = type(loss).__call__ is not keras.Loss.__call__
        weighs = loss.reduction == "mean_with_sample_weight"
        divisor = tf.reduce_sum(self(y, predicted, weight if weighs else None))
        if self.of_batch:
            self.by_rows, self.sums = True, False
        self.value = tf.ones_like(divisor) if self.sums else divisor

    def call(self, y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        """Return 1 for each value of the loss, with the mask that the loss derives from targets."""
        rows = tf.shape(keras.tree.flatten(y)[0])[:1]
        if self.of_batch:
            return tf.ones(rows, self.dtype)
        values = self._loss.call(y, predicted)
        self.by_rows = self.by_rows and not is_masked(values)
        self.of_batch = not values.shape.rank or isinstance(self._loss, _OF_BATCH)
        ones = tf.ones_like(values) if values.shape.rank else tf.ones(rows, values.dtype)
        return attach_mask(ones, mask_of(values))


def _masking(graph: Functional) -> Callable[[list[Nest]], list[tf.Tensor]] | None:
    """Return a function that computes output masks from inputs, or None if no output has a mask.

    Raises:
        InvalidInput: The masks of the outputs depend on weights.
    """
    output_masks = [mask_of(output) for output in graph.outputs if is_masked(output)]
    if not output_masks:
        return None
    reject_lost_masks(graph)
    model = keras.Model(graph.inputs, output_masks)
    if model.variables:
        raise InvalidInput(
            f"the mask of the predictions depends on weights ({model.variables[0].path}), but the "
            "weight of each part of a batch must be known before the forward pass; use one "
            "micro-batch and one replica, or compute the mask from the inputs "
            "(Embedding(mask_zero=True), Masking)"
        )

    def masks(x: list[Nest]) -> list[tf.Tensor]:
        values: list[tf.Tensor] = keras.tree.flatten(model(x))
        return values

    compiled: Callable[[list[Nest]], list[tf.Tensor]] = tf.function(
        masks, autograph=False, reduce_retracing=True
    )
    return compiled


def _first(value: tf.Tensor | None, rows: int | None) -> tf.Tensor | None:
    return None if value is None else value[:rows]


def _rows(part: LossTargets) -> int:
    return len(keras.tree.flatten(part.y)[0])


def _zeros(spec: keras.KerasTensor, like: tf.Tensor, steps: int | None) -> tf.Tensor:
    """Return zeros shaped like the predictions, with unknown dimensions taken from the targets."""
    rows, *shape = [like.shape[n] if axis is None else axis for n, axis in enumerate(spec.shape)]
    return tf.zeros([rows, *shape] if steps is None else [rows, steps, *shape[1:]], spec.dtype)
