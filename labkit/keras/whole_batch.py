"""Losses and normalizations of the whole batch, of which each rank has a part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables, rows_of
from labkit.keras.sums import Sums
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.losses import Divisor, build, with_each


class _Shared(NamedTuple):
    """A metric whose batches without known size count, on each rank, by its share of them."""

    metric: keras.metrics.Metric
    share: tf.Tensor

    def update_state(self, value: tf.Tensor, sample_weight: int | None = None) -> None:
        """As Keras does it, which counts such a batch once."""
        weight = self.share if sample_weight is None else sample_weight
        self.metric.update_state(value, sample_weight=weight)


@dataclass(frozen=True)
class WholeBatch(Hook):
    r"""The loss of a rank's part counts as in the loss of the whole batch.

    A loss of Keras is \(N/D\): D is the number of values that no mask leaves out, the sum of their
    weights, or 1. Gradients are averaged by rows, \(\sum_r b_r g_r / B\); times
    \((D_r/D)(B/b_r)\) the loss \(N_r/D_r\) of a part therefore becomes that of the whole, with its
    gradient. Where D is in proportion to rows, as in a plain mean, the factor is 1, and ranks need
    not meet.

    `BatchNormalization(synchronized=True)` normalizes by the moments of the whole batch, and its
    gradient goes through those of all ranks.

    Args:
        model: compiled, with a distributed optimizer.
        communicator: the ranks.
        tests: whether batches of validation are parts of whole ones, too.
    """

    name: ClassVar[str] = "whole"

    model: keras.Model
    communicator: Communicator
    tests: bool = False
    sums: Sums = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", Sums(self.model, self.communicator))

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Know that a batch is a part."""
        with self.sums.step(True):
            return inner(data)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Know whether a batch is a part."""
        with self.sums.step(self.tests):
            return inner(data)

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """The exchange comes after the sums of the step."""
        with tf.control_dependencies(self.sums.before()):
            return inner(gradients, variables)

    def compiled_loss(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        compiled: keras.Loss,
        y: Nest,
        predicted: Nest,
        weight: Nest = None,
    ) -> tf.Tensor:
        """The loss of a batch, each of its losses times what this part counts."""
        if not self.sums.within:
            return inner(y, predicted, weight)
        build(compiled, lambda: inner(y, predicted, weight))
        kept, divisors = compiled.metrics[:], list[Divisor]()

        def look(_: int, loss: keras.Loss, *given: tf.Tensor | None) -> tf.Tensor:
            divisors.append(Divisor(loss, *given))
            return tf.zeros((), loss.dtype)

        compiled.metrics[:] = [None] * len(kept)
        try:
            with_each(compiled, look, lambda: inner(y, predicted, weight))
        finally:
            compiled.metrics[:] = kept
        for name in {each.name for each in divisors if each.of_batch} - self.sums.named:
            self.sums.named.add(name)  # steps are traced more than once
            text = f"loss {name!r} is of a batch as a whole: that of parts is averaged by rows"
            say_on_first(self.communicator, text)
        own = rows_of(y) if rows is None else rows
        in_proportion = all(each.by_rows for each in divisors)
        if in_proportion and (not kept or isinstance(own, int)):
            return inner(y, predicted, weight)
        share, factors = self._factors(divisors, tf.cast(own, tf.float64))

        def counted(number: int, loss: keras.Loss, *given: tf.Tensor | None) -> tf.Tensor:
            value = loss(*given)
            return value * tf.cast(factors[number], value.dtype)

        compiled.metrics[:] = [_Shared(metric, share) for metric in kept]
        try:
            return with_each(compiled, counted, lambda: inner(y, predicted, weight))
        finally:
            compiled.metrics[:] = kept

    def _factors(
        self, divisors: list[Divisor], rows: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """This rank's share of the rows, and what its part counts in each loss."""
        own = [tf.cast(each.value, tf.float64) for each in divisors]
        some = tf.cast(rows > 0, tf.float64)  # a stand-in for no rows counts nothing
        values = tf.stack([rows, *own]) * some
        whole = self.sums.total(values, "the parts of the loss")
        share = tf.math.divide_no_nan(rows, whole[0])
        enlarge = tf.math.divide_no_nan(whole[0], rows)
        return share, [
            some
            if each.by_rows
            else enlarge * (1.0 if each.sums else tf.math.divide_no_nan(mine, of_all))
            for each, mine, of_all in zip(
                divisors, tf.unstack(values[1:]), tf.unstack(whole[1:]), strict=True
            )
        ]

    def moments(
        self,
        inner: Callable[..., tuple[tf.Tensor, tf.Tensor]],
        rows: Rows,
        layer: keras.layers.BatchNormalization,
        inputs: tf.Tensor,
        mask: tf.Tensor | None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Mean and variance of the whole batch, as Keras has them of a batch."""
        if not self.sums.within or rows is None:
            return inner(inputs, mask)
        counted, axes = tf.cast(rows, inputs.dtype), layer._reduction_axes
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        # What stands in for no rows counts nothing.
        weights *= tf.cast(counted > 0, inputs.dtype)

        def mean(values: tf.Tensor, what: str) -> tf.Tensor:
            total = tf.reduce_sum(weights * values, axes)
            what = f"the {what} of {layer.path}"
            return self.sums.differentiable(total, counted, what) / number

        number = self.sums.total(tf.reduce_sum(weights, axes), f"the samples of {layer.path}")
        number += 0.0 if mask is None else keras.config.epsilon()  # so Keras divides
        center = mean(inputs, "mean")
        return center, mean(tf.square(inputs - center), "variance")


def say_on_first(communicator: Communicator, text: str) -> None:
    """Tell the user, from one rank."""
    if communicator.rank == 0:
        print(f"labkit: {text}", file=sys.stderr)
