"""Sums over the ranks inside a training step, which all ranks compute in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
from labkit.exchange.hooks import Rows
from labkit.keras.optimizer import distributed_optimizers


class ReplicaSums:
    """Collective sums over ranks inside a step, before the step's gradients are exchanged.

    TensorFlow runs operations in any order that their data allow, but all ranks must communicate in
    the same order. Each sum therefore waits for the sum that was traced before, and the gradient
    exchange waits for the last sum.

    Args:
        model: Model with a distributed optimizer.
        communicator: Communicator of the ranks over which values are summed.

    Attributes:
        within: Whether the step that is being traced has a part of a global batch.
        named: Names of losses about which the user has been warned.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._last: tf.Tensor | None = None  # result of the last traced sum
        self._number = 0  # number of collective calls in the traced step
        self._updated: list[keras.Variable] = []  # variables updated since the last call
        self._gathered: dict[
            int, tuple[tf.Tensor, tf.Tensor]
        ] = {}  # local and joined tensor, by id
        self.within = False
        self.named: set[str] = set()

    @contextmanager
    def step(self, is_part: bool) -> Iterator[None]:
        """Open the context of a traced step, whose batch is part of a global batch if `is_part`."""
        self._last, self._number, self.within = None, 0, is_part
        self._updated, self._gathered = [], {}
        try:
            yield
        finally:
            self.within = False
            self._gathered = {}

    def dependencies(self) -> list[tf.Tensor]:
        """Return the last sum, for which the next collective call must wait; [] without sums."""
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
        """Make the next collective call wait until variables are updated."""
        self._updated += variables

    def total(self, values: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) over the ranks; no gradient flows through it.

        Args:
            values: A vector of the same length on all ranks.
            label: Name of the sum in timeout messages; it must not contain Keras layer names,
                because the numbers in layer names may differ between ranks.
        """

        def add_up(call: str, local: np.ndarray) -> list[np.ndarray]:
            return [self._communicator.allreduce_small(local, call).astype(local.dtype)]

        (total,) = self._call_collective(add_up, [values], label)
        return tf.ensure_shape(total, values.shape)

    def mean(self, numbers: Sequence[tf.Tensor], rows: Rows, label: str) -> list[tf.Tensor]:
        """Return the mean over the ranks of each number, weighted by the ranks' rows."""
        row_count = tf.cast(rows, tf.float64)
        parts = [
            tf.math.multiply_no_nan(tf.cast(number, tf.float64), row_count) for number in numbers
        ]
        whole, *totals = tf.unstack(self.total(tf.stack([row_count, *parts]), label))
        means = [tf.math.divide_no_nan(total, whole) for total in totals]
        return [tf.cast(mean, number.dtype) for mean, number in zip(means, numbers, strict=True)]

    def gather(self, values: Sequence[tf.Tensor], rows: Rows, label: str) -> list[tf.Tensor]:
        """Return the rows of all ranks in rank order; a step sends the same tensor only once.

        Args:
            values: Tensors with the rows of this rank, or with a row of zeros if the rank has no
                rows.
            rows: Number of rows of this rank.
            label: Name of the call in timeout messages, see `total`.
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
        """Call a collective function on values; results have the dtypes of `like` or `values`."""
        self._number += 1
        call = f"collective call {self._number} of the step: {what}"

        def call_in_order(*local: np.ndarray) -> list[np.ndarray]:
            for optimizer in distributed_optimizers(self._model):
                optimizer.exchange.service.settle()  # one thread at a time may call MPI
            self._communicator.wait_policy.polite = False  # spinning is harmless: the step waits
            return collective(call, *local)

        # Earlier updates of variables in the step must precede this call, wherever they were
        # traced.
        updates = [tf.convert_to_tensor(tensor) for tensor in self._updated]
        with tf.control_dependencies([*self.dependencies(), *updates]):
            types = [tensor.dtype for tensor in like or values]
            result = tf.numpy_function(call_in_order, values, types)
        results = (
            [result] if tf.is_tensor(result) else list(result)
        )  # eagerly, a single result is no list
        self._last, self._updated = results[0], []
        return results

    def differentiable(self, values: tf.Tensor, rows: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) over the ranks, through which gradients flow.

        The gradient exchange computes \(\sum_s b_s g_s / \sum_s b_s\), where \(b_s\) is the number
        of rows of rank s. For the gradient of the mean loss of all ranks, the gradient of rank r
        through this sum is therefore \(\sum_s b_s u_s / b_r\), where \(u_s\) is the upstream
        gradient on rank s.

        Args:
            values: A vector of the same length on all ranks.
            rows: Scalar, the number of samples \(b_r\) in this rank's batch.
            label: Name of the sum in timeout messages, see `total`.
        """
        weight = tf.cast(rows, values.dtype)

        def add_up(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(upstream: tf.Tensor) -> tf.Tensor:
                total = self.total(tf.math.multiply_no_nan(upstream, weight), f"{label}, backwards")
                return tf.math.divide_no_nan(total, weight)

            return self.total(local, label), back

        return tf.custom_gradient(add_up)(values)
