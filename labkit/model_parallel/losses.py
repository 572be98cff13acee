"""The losses that a model is compiled with, of parts of a batch: each counts as Keras counts it."""

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
    functional_of,
    is_masked,
    leaves,
    mask_of,
    masked,
    refuse_lost_masks,
)

if TYPE_CHECKING:
    from keras.src.models.functional import Functional

Counts: TypeAlias = "npt.NDArray[np.float64] | None"
Weighted: TypeAlias = "tuple[Nest, tf.Tensor | None]"  # weights of samples, and `Counts`
# Of a loss, targets, predictions and weights of samples: a number.
Each: TypeAlias = Callable[[keras.Loss, tf.Tensor, tf.Tensor, tf.Tensor | None], tf.Tensor]
_MEANS = ("sum_over_batch_size", "mean")
_OF_BATCH = (keras.losses.Circle,)  # whose numbers, one a sample, are of pairs of the batch


class Aims(NamedTuple):
    """Targets, weights of samples (or None) and the masks of predictions, of the same rows.

    Where these are some time steps of all, `steps` says how many.
    """

    y: Nest
    weight: Nest
    masks: Sequence[tf.Tensor | None] = ()
    steps: int | None = None


class Losses:
    r"""The loss of a batch as the sum of those of its parts.

    A loss of Keras is \(L = \frac{1}{D} \sum_k w_k l_k\) over values k that no mask leaves out. By
    its reduction D is their number, the sum of their weights, or 1. Of parts i
    \(L = \sum_i \frac{D_i}{D} L_i\), where i counts by its rows alone if \(D_i\) is in proportion
    to them. Else D is added up over all parts before the first of them goes through the model: it
    takes targets, weights, and masks that come from the inputs.

    Args:
        model: the whole one, compiled.
        readers: those that divide the batch: a loss is of all of their rows.
        parts: into which each of them divides its rows.

    Raises:
        InvalidInput: a loss that is not one number; a mask that only weights can tell.
    """

    def __init__(self, model: keras.Model, readers: Communicator, parts: int) -> None:
        self._graph, self._readers = functional_of(model), readers
        self._alone = parts == readers.size == 1
        # Keras's own object: it knows which loss is of which target and prediction.
        given = model._compile_loss
        kind, weights = type(given), given._user_loss_weights
        self._compiled = kind(given._user_loss, weights, output_names=given.output_names)
        self._by_rows: bool | None = None  # not known yet
        self._sums: list[bool] = []  # of losses: which ones divide by nothing
        self._masking = None if self._alone else _masking(self._graph)

    def __call__(self, y: Nest, predicted: Nest, weight: Weighted) -> tf.Tensor:
        """The loss of a part.

        Args:
            y: targets.
            predicted: the outputs of the model, with their masks.
            weight: weights of samples, and what `counts` has found for this part.
        """
        samples, counts = weight

        def counted(number: int, loss: keras.Loss, *given: tf.Tensor | None) -> tf.Tensor:
            value = loss(*given)
            return value if counts is None else value * tf.cast(counts[number], value.dtype)

        return self._total(counted, y, predicted, samples)

    def masks(self, x: Nest) -> list[tf.Tensor | None]:
        """Those of the outputs of a batch, ahead of these."""
        found = iter([] if self._masking is None else self._masking(leaves(self._graph, x)))
        return [next(found, None) if is_masked(output) else None for output in self._graph.outputs]

    def counts(self, parts: Sequence[Aims], shares: Sequence[float]) -> list[Counts]:
        """What each part counts in each loss, in units of its share (collective).

        Args:
            parts: of this rank's rows.
            shares: by which the losses of parts are multiplied besides.
        """
        if self._by_rows is None:
            divisors = self._look(parts[0], 1)
            self._by_rows = all(divisor.by_rows for divisor in divisors)
            self._sums = [divisor.sums for divisor in divisors]
        if self._alone or self._by_rows:
            return [None] * len(parts)
        own = np.array([[float(each.value) for each in self._look(part)] for part in parts])
        rows = sum(map(_rows, parts))
        total, *of_all = self._readers.tally(np.array([rows, *own.sum(axis=0)]), "a loss's parts")
        whole = np.where(np.logical_or(self._sums, np.array(of_all) <= 0), 1.0, of_all)
        # Gradients of readers are averaged by their rows afterwards.
        units = total / max(rows, 1) / whole
        return [
            row * units / share if share else None for row, share in zip(own, shares, strict=True)
        ]

    def _look(self, part: Aims, rows: int | None = None) -> list[Divisor]:
        """What each loss divides by."""
        found: list[Divisor] = []

        def look(number: int, loss: keras.Loss, *given: tf.Tensor | None) -> tf.Tensor:
            found.append(Divisor(loss, *given))
            return tf.zeros(())

        of = part.y, part.weight, list(part.masks)
        y, weight, masks = keras.tree.map_structure(lambda each: _first(each, rows), of)
        flat = keras.tree.flatten(y)
        specs = self._graph.outputs
        like = flat if len(flat) == len(specs) else flat[:1] * len(specs)
        masks = masks or [None] * len(specs)
        blank = [
            masked(_zeros(spec, each, part.steps), mask)
            for spec, each, mask in zip(specs, like, masks, strict=True)
        ]
        self._total(look, y, nested(self._graph, blank), weight)
        return found

    def _total(self, each: Each, y: Nest, predicted: Nest, samples: tf.Tensor | None) -> tf.Tensor:
        """Keras's sum of losses, with another function in the place of each."""
        compiled = self._compiled
        if not compiled.built:
            compiled(y, predicted, samples)
            compiled.metrics[:] = [None] * len(compiled.metrics)  # nobody asks for its means
        return with_each(compiled, each, lambda: compiled(y, predicted, samples))


def with_each(compiled: keras.Loss, each: Each, call: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What a call of Keras's sum of losses returns, with another function in the place of each."""
    own = compiled._flat_losses
    compiled._flat_losses = [
        entry._replace(loss=partial(each, number, entry.loss)) for number, entry in enumerate(own)
    ]
    try:
        return call()
    finally:
        compiled._flat_losses = own


def build(compiled: keras.Loss, call: Callable[[], tf.Tensor]) -> None:
    """Let Keras's sum of losses find out which loss is of what, by a call that counts nothing."""
    if not compiled.built:  # in a graph that nobody runs, as its metrics count what they see
        tf.function(call, autograph=False).get_concrete_function()


class WholeLosses:
    """The mean loss of batches of which several ranks have parts, part by part."""

    def __init__(self) -> None:
        self._parts: dict[
            int, np.ndarray
        ] = {}  # by batch: rows; numerator and divisor of each loss
        self._weights: list[float] = []

    def add(
        self, batch: int, compiled: keras.Loss, y: Nest, predicted: Nest, weight: Nest, rows: int
    ) -> None:
        """Count a part; Keras's metrics count it, too.

        Args:
            batch: number of the batch, the same on all ranks.
            compiled: the losses of a model.
            y, predicted, weight: as Keras gives them.
            rows: of the part.
        """
        found: list[float] = [rows]

        def each(_: int, loss: keras.Loss, *given: tf.Tensor | None) -> tf.Tensor:
            value, divisor = loss(*given), Divisor(loss, *given)
            count = float(divisor.value)
            found.extend([float(value) * count, 0.0 if divisor.sums else count])
            return value

        build(compiled, lambda: compiled(y, predicted, weight))
        with_each(compiled, each, lambda: compiled(y, predicted, weight))
        self._parts[batch] = np.array(found)
        weights = [entry.loss_weights for entry in compiled._flat_losses]
        self._weights = [1.0 if each is None else float(each) for each in weights]

    def mean(self, communicator: Communicator) -> float:
        """Over the batches, by their rows (collective)."""
        told = communicator.allgather((self._parts, self._weights), "the losses of parts")
        weights = np.array(max((known for _, known in told), key=len))
        batches: dict[int, np.ndarray] = {}
        for number, part in (pair for parts, _ in told for pair in parts.items()):
            batches[number] = batches.get(number, 0.0) + part
        rows = np.array([part[0] for part in batches.values()])
        numerators = np.array([part[1::2] for part in batches.values()])
        divisors = np.array([part[2::2] for part in batches.values()])
        losses = numerators / np.where(divisors == 0, 1.0, divisors)  # a sum divides by nothing
        return float(rows @ losses @ weights / rows.sum())


def nested(graph: Functional, outputs: Sequence[tf.Tensor]) -> Nest:
    """Outputs in the structure in which the model returns them."""
    return (
        outputs[0]
        if len(outputs) == 1
        else keras.tree.pack_sequence_as(graph._outputs_struct, outputs)
    )


class Divisor(keras.losses.Loss):
    """What a loss divides the sum of its values by: Keras's sum, with ones for the values.

    Args:
        loss: of Keras.
        y, predicted, weight: of some rows; predictions only lend their shape and mask.

    Attributes:
        value: the number; 1 for a sum.
        sums: whether the loss divides by nothing.
        by_rows: whether the number is in proportion to rows.
        of_batch: whether the loss is of a batch as a whole, which nobody can divide among its
            parts: it is taken for a mean over rows.

    Raises:
        InvalidInput: the loss has a number for each sample.
    """

    def __init__(
        self, loss: keras.Loss, y: tf.Tensor, predicted: tf.Tensor, weight: tf.Tensor | None
    ) -> None:
        if loss.reduction in (None, "none"):
            raise InvalidInput(
                f"loss {loss.name!r} has reduction={loss.reduction!r}: a number for each sample, "
                "but training in parts goes back from one; use 'sum' or 'sum_over_batch_size'"
            )
        super().__init__(loss.name, "sum", loss.dtype)
        self._loss, self.sums = loss, loss.reduction == "sum"
        self.by_rows = loss.reduction in _MEANS and not is_masked(predicted)
        self.of_batch = type(loss).__call__ is not keras.Loss.__call__
        weighs = loss.reduction == "mean_with_sample_weight"
        found = tf.reduce_sum(self(y, predicted, weight if weighs else None))
        if self.of_batch:
            self.by_rows, self.sums = True, False
        self.value = tf.ones_like(found) if self.sums else found

    def call(self, y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        """Ones, with the mask that the loss itself makes of targets."""
        rows = tf.shape(keras.tree.flatten(y)[0])[:1]
        if self.of_batch:
            return tf.ones(rows, self.dtype)
        values = self._loss.call(y, predicted)
        self.by_rows = self.by_rows and not is_masked(values)
        self.of_batch = not values.shape.rank or isinstance(self._loss, _OF_BATCH)
        ones = tf.ones_like(values) if values.shape.rank else tf.ones(rows, values.dtype)
        return masked(ones, mask_of(values))


def _masking(graph: Functional) -> Callable[[list[Nest]], list[tf.Tensor]] | None:
    """A function of the inputs that makes the masks of the outputs alone."""
    found = [mask_of(output) for output in graph.outputs if is_masked(output)]
    if not found:
        return None
    refuse_lost_masks(graph)
    model = keras.Model(graph.inputs, found)
    if model.variables:
        raise InvalidInput(
            f"the mask of the predictions depends on weights ({model.variables[0].path}), but how "
            "much each part of a batch counts must be known before; use one micro-batch and one "
            "replica, or make the mask from the inputs (Embedding(mask_zero=True), Masking)"
        )

    def masks(x: list[Nest]) -> list[tf.Tensor]:
        found: list[tf.Tensor] = keras.tree.flatten(model(x))
        return found

    compiled: Callable[[list[Nest]], list[tf.Tensor]] = tf.function(
        masks, autograph=False, reduce_retracing=True
    )
    return compiled


def _first(value: tf.Tensor | None, rows: int | None) -> tf.Tensor | None:
    return None if value is None else value[:rows]


def _rows(part: Aims) -> int:
    return len(keras.tree.flatten(part.y)[0])


def _zeros(spec: keras.KerasTensor, like: tf.Tensor, steps: int | None) -> tf.Tensor:
    """What could be predictions for these targets, which know what the shape leaves open."""
    rows, *shape = [like.shape[n] if axis is None else axis for n, axis in enumerate(spec.shape)]
    return tf.zeros([rows, *shape] if steps is None else [rows, steps, *shape[1:]], spec.dtype)
