"""Losses and normalizations of a whole batch whose samples are divided among ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables, rows_of
from labkit.keras.optimizer import distributed_optimizers
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.losses import Divisor, build_losses, with_loss_function


class ReplicaSums:
    """Collective sums over the ranks inside a step, before the ranks exchange gradients.

    TensorFlow executes operations in any order that their data dependencies allow. All ranks must
    communicate in the same order. Each sum waits for the previously traced sum. The gradient
    exchange waits for the last sum. Waiting makes the order of communication the same on all ranks.

    Args:
        model: Model with a distributed optimizer.
        communicator: Communicator of the ranks over which values are summed.

    Attributes:
        within: Whether the step that is being traced receives only a part of a global batch.
        named: Names of losses about which the user has already been warned.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        # The attribute `_last` is a result of the most recently traced collective call.
        self._last: tf.Tensor | None = None
        self._number = 0  # The attribute `_number` counts the collective calls in the traced step.
        # The list `_updated` contains the variables that were updated since the last collective
        # call.
        self._updated: list[keras.Variable] = []
        # The keys of `_gathered` are the ids of tensors. Each value is a pair: a rank's own tensor
        # and the joined tensor of all ranks.
        self._gathered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        self.within = False
        self.named: set[str] = set()

    @contextmanager
    def step(self, is_part: bool) -> Iterator[None]:
        """Open a context for a traced step; `is_part` says whether its batch is part of another."""
        self._last, self._number, self.within = None, 0, is_part
        self._updated, self._gathered = [], {}
        try:
            yield
        finally:
            self.within = False
            self._gathered = {}

    def dependencies(self) -> list[tf.Tensor]:
        """Return the last sum in a list, so that the next collective call waits for it; or []."""
        if self._last is None or not tf.inside_function():
            return []
        if self._last.graph is not tf.compat.v1.get_default_graph():
            raise InvalidInput(
                "sums over the ranks inside a loop or a branch of the model (a synchronized "
                "BatchNormalization in TimeDistributed or a recurrent layer) have no common order "
                "on all ranks; use synchronized=False there, and update metrics outside"
            )
        return [self._last]

    def wait_for_updates(self, variables: Sequence[keras.Variable]) -> None:
        """Make the next collective call wait until the given variables are updated."""
        self._updated += variables

    def total(self, values: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) of the values of all ranks s, without gradients.

        Args:
            values: A vector; its length is the same on all ranks.
            label: Name of the sum in timeout messages. The label must not contain names of Keras
                layers. The numbers in names of Keras layers may differ between ranks.
        """

        def add_up(call: str, local: np.ndarray) -> list[np.ndarray]:
            return [self._communicator.allreduce_small(local, call).astype(local.dtype)]

        (total,) = self._call_collective(add_up, [values], label)
        return tf.ensure_shape(total, values.shape)

    def mean(self, numbers: Sequence[tf.Tensor], rows: Rows, label: str) -> list[tf.Tensor]:
        """Return each number's mean over the ranks, weighted by the number of samples per rank."""
        row_count = tf.cast(rows, tf.float64)
        parts = [
            tf.math.multiply_no_nan(tf.cast(number, tf.float64), row_count) for number in numbers
        ]
        whole, *totals = tf.unstack(self.total(tf.stack([row_count, *parts]), label))
        means = [tf.math.divide_no_nan(total, whole) for total in totals]
        return [tf.cast(mean, number.dtype) for mean, number in zip(means, numbers, strict=True)]

    def gather(self, values: Sequence[tf.Tensor], rows: Rows, label: str) -> list[tf.Tensor]:
        """Return the samples of all ranks, in rank order; a step sends each tensor only once.

        Args:
            values: Tensors with the samples of this rank. A rank without samples passes one sample
                of zeros.
            rows: Number of samples of this rank.
            label: Name of the call in timeout messages, as for `total`.
        """

        def join(call: str, count: np.ndarray, *local: np.ndarray) -> list[np.ndarray]:
            parts = self._communicator.allgather([v if count else v[:0] for v in local], call)
            return [np.concatenate(column) for column in zip(*parts, strict=True)]

        new = [value for value in values if id(value) not in self._gathered]
        if new:
            joined = self._call_collective(join, [tf.cast(rows, tf.int64), *new], label, new)
            for value, whole in zip(new, joined, strict=True):
                if value.shape.rank:
                    whole.set_shape([None, *value.shape[1:]])
                self._gathered[id(value)] = value, whole
        return [self._gathered[id(value)][1] for value in values]

    def _call_collective(
        self,
        collective: Callable[..., list[np.ndarray]],
        values: list[tf.Tensor],
        what: str,
        like: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """Call a collective function; results get the dtypes of `like` or, by default, `values`."""
        self._number += 1
        call = f"collective call {self._number} of the step: {what}"

        def call_in_order(*local: np.ndarray) -> list[np.ndarray]:
            for optimizer in distributed_optimizers(self._model):
                # Only one thread at a time may call MPI. The method `settle` therefore waits until
                # the gradient exchange thread is idle.
                optimizer.exchange.service.settle()
            # Busy waiting does not delay the step, because the step waits for the collective call
            # anyway.
            self._communicator.wait_policy.polite = False
            return collective(call, *local)

        # The collective call waits for all earlier variable updates of the step, wherever the
        # updates were traced.
        updates = [tf.convert_to_tensor(tensor) for tensor in self._updated]
        with tf.control_dependencies([*self.dependencies(), *updates]):
            types = [tensor.dtype for tensor in like or values]
            result = tf.numpy_function(call_in_order, values, types)
        results = (
            [result] if tf.is_tensor(result) else list(result)
        )  # In eager mode, `tf.numpy_function` returns a single result without a list.
        self._last, self._updated = results[0], []
        return results

    def differentiable(self, values: tf.Tensor, rows: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) of the values of all ranks s, with gradients.

        Rank s has \(b_s\) samples and the gradient \(g_s\). The gradient exchange computes \(\sum_s
        b_s g_s / \sum_s b_s\). On rank s, the derivative of the loss by the sum is \(u_s\). The
        gradient of the sum takes account of each rank's number of samples. The gradient of the sum
        is \(\sum_s b_s u_s / b_r\). The exchange then gives the gradient of the mean loss of all
        ranks.

        Args:
            values: A vector; its length is the same on all ranks.
            rows: Number of samples \(b_r\) in the batch of this rank r, as a scalar.
            label: Name of the sum in timeout messages, as for `total`.
        """
        weight = tf.cast(rows, values.dtype)

        def add_up(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(upstream: tf.Tensor) -> tf.Tensor:
                total = self.total(tf.math.multiply_no_nan(upstream, weight), f"{label}, backwards")
                return tf.math.divide_no_nan(total, weight)

            return self.total(local, label), back

        return tf.custom_gradient(add_up)(values)


class _Shared(NamedTuple):
    """A metric wrapper that weights each update by this rank's fraction of the batch's samples."""

    metric: keras.metrics.Metric
    share: tf.Tensor

    def update_state(self, value: tf.Tensor, sample_weight: int | None = None) -> None:
        """Update the metric; the default weight is this rank's fraction of samples instead of 1."""
        weight = self.share if sample_weight is None else sample_weight
        self.metric.update_state(value, sample_weight=weight)


@dataclass(frozen=True)
class WholeBatch(Hook):
    r"""A hook that makes losses and synchronized normalizations use the whole batch of all ranks.

    A Keras loss is \(N/D\). The numerator N of a Keras loss is the sum of the weighted values. The
    reduction of a Keras loss determines its divisor D. The divisor D counts the unmasked values,
    sums their weights, or is 1. Gradients \(g_r\) of ranks r are averaged as \(\sum_r b_r g_r /
    B\). In the average gradient, \(b_r\) is the number of samples of rank r, and \(B = \sum_r
    b_r\). To obtain the gradient of the whole batch, rank r rescales its loss \(N_r/D_r\). The
    factor of the loss on rank r is \((D_r/D)(B/b_r)\). With the factors \((D_r/D)(B/b_r)\), the
    mean loss and gradient over ranks are those of the whole batch. The divisor D of a mean is
    proportional to the number of samples. With a proportional divisor D, the factor of each rank's
    loss is 1. A factor of 1 needs no communication between ranks.

    `BatchNormalization(synchronized=True)` normalizes by the mean and variance of the whole batch.
    The gradient of a synchronized normalization also flows through the statistics of all ranks.

    Args:
        model: Compiled model with a distributed optimizer.
        communicator: Communicator of the ranks that divide each batch.
        tests: Whether the ranks also divide validation batches.
    """

    name: ClassVar[str] = "whole"

    model: keras.Model
    communicator: Communicator
    tests: bool = False
    sums: ReplicaSums = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", ReplicaSums(self.model, self.communicator))

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run a training step; its batch is this rank's part of a whole batch."""
        with self.sums.step(True):
            return inner(data)

    def test_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Run one evaluation step on a batch."""
        with self.sums.step(self.tests):
            return inner(data)

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Apply gradients after the sums over ranks, so that all ranks communicate in one order."""
        with tf.control_dependencies(self.sums.dependencies()):
            result = inner(gradients, variables)
        self.sums.wait_for_updates(variables or self.model.trainable_variables)
        return result

    def compiled_loss(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        compiled: keras.Loss,
        y: Nest,
        predicted: Nest,
        weight: Nest = None,
    ) -> tf.Tensor:
        """Return this rank's loss, scaled so that the mean over ranks is the whole batch's loss."""
        if not self.sums.within:
            return inner(y, predicted, weight)
        build_losses(compiled, lambda: inner(y, predicted, weight))
        loss_metrics, divisors = compiled.metrics[:], list[Divisor]()

        def record_divisor(_: int, loss: keras.Loss, *tensors: tf.Tensor | None) -> tf.Tensor:
            divisors.append(Divisor(loss, *tensors))
            return tf.zeros((), loss.dtype)

        compiled.metrics[:] = [None] * len(loss_metrics)
        try:
            with_loss_function(compiled, record_divisor, lambda: inner(y, predicted, weight))
        finally:
            compiled.metrics[:] = loss_metrics
        for name in {divisor.name for divisor in divisors if divisor.of_batch} - self.sums.named:
            # TensorFlow may trace a step again, so the set `named` limits the warnings to one per
            # loss.
            self.sums.named.add(name)
            text = (
                f"loss {name!r} is defined only for a whole batch; labkit instead averages "
                "the losses of the ranks"
            )
            print_on_first_rank(self.communicator, text)
        local_rows = rows_of(y) if rows is None else rows
        in_proportion = all(divisor.by_rows for divisor in divisors)
        if in_proportion and (not loss_metrics or isinstance(local_rows, int)):
            return inner(y, predicted, weight)
        share, factors = self._factors(divisors, tf.cast(local_rows, tf.float64))

        def scaled_loss(number: int, loss: keras.Loss, *tensors: tf.Tensor | None) -> tf.Tensor:
            value = loss(*tensors)
            return value * tf.cast(factors[number], value.dtype)

        compiled.metrics[:] = [_Shared(metric, share) for metric in loss_metrics]
        try:
            return with_loss_function(compiled, scaled_loss, lambda: inner(y, predicted, weight))
        finally:
            compiled.metrics[:] = loss_metrics

    def _factors(
        self, divisors: list[Divisor], rows: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Return this rank's fraction of the samples, and the factors that scale its losses."""
        local_divisors = [tf.cast(divisor.value, tf.float64) for divisor in divisors]
        # The factor `has_rows` is 0 for an empty batch, and otherwise 1.
        has_rows = tf.cast(rows > 0, tf.float64)
        values = tf.stack([rows, *local_divisors]) * has_rows
        whole = self.sums.total(values, "the rows and divisors of the loss")
        share = tf.math.divide_no_nan(rows, whole[0])
        enlarge = tf.math.divide_no_nan(whole[0], rows)
        return share, [
            has_rows
            if divisor.by_rows
            else enlarge
            * (1.0 if divisor.sums else tf.math.divide_no_nan(local_value, global_value))
            for divisor, local_value, global_value in zip(
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
        """Return the mean and variance over the batch of all ranks, shaped as in Keras."""
        if not self.sums.within or rows is None:
            return inner(inputs, mask)
        row_count, axes = tf.cast(rows, inputs.dtype), layer._reduction_axes
        weights = tf.ones_like(inputs)
        if mask is not None:
            weights *= tf.cast(mask, inputs.dtype)[..., tf.newaxis]
        # An empty batch is replaced by a sample of zeros, and this sample must have weight 0.
        weights *= tf.cast(row_count > 0, inputs.dtype)

        def mean(values: tf.Tensor, what: str) -> tf.Tensor:
            total = tf.reduce_sum(weights * values, axes)
            return self.sums.differentiable(total, row_count, what) / number

        number = self.sums.total(
            tf.reduce_sum(weights, axes), "the number of samples of a normalization"
        )
        # Like Keras, the code adds epsilon to the divisor of the mean if the input has a mask.
        number += 0.0 if mask is None else keras.config.epsilon()
        center = mean(inputs, "the mean of a normalization")
        return center, mean(tf.square(inputs - center), "the variance of a normalization")


def print_on_first_rank(communicator: Communicator, text: str) -> None:
    """Print a message of labkit to the standard error output, on rank 0 only."""
    if communicator.rank == 0:
        print(f"labkit: {text}", file=sys.stderr)
