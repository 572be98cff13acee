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
    """Collective sums over the ranks inside a step, before the ranks exchange gradients.

    TensorFlow executes operations in any order that their data dependencies allow, but all ranks
    must communicate in the same order. Each sum therefore waits for the previously traced sum, and
    the gradient exchange waits for the last sum.

    Args:
        model: Model with a distributed optimizer.
        communicator: Communicator of the ranks over which values are summed.

    Attributes:
        within: Whether the batch of the step that is being traced is part of a global batch.
        named: Names of losses about which the user has already been warned.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._last: tf.Tensor | None = None  # result of the sum that was traced last
        self._number = 0  # number of collective calls in the traced step
        # Variables that were updated since the last collective call.
        self._updated: list[keras.Variable] = []
        self._gathered: dict[
            int, tuple[tf.Tensor, tf.Tensor]
        ] = {}  # by tensor id: the local tensor, and the joined tensor of all ranks
        self.within = False
        self.named: set[str] = set()

    @contextmanager
    def step(self, is_part: bool) -> Iterator[None]:
        """Open the context of a traced step; if `is_part`, its batch is part of a global batch."""
        self._last, self._number, self.within = None, 0, is_part
        self._updated, self._gathered = [], {}
        try:
            yield
        finally:
            self.within = False
            self._gathered = {}

    def dependencies(self) -> list[tf.Tensor]:
        """Return a list with the last sum, for which the next collective call must wait, or []."""
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
        """Make the next collective call wait until these variables are updated."""
        self._updated += variables

    def total(self, values: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) of the values of all ranks s, without gradients.

        Args:
            values: A vector; its length is the same on all ranks.
            label: Name of the sum in timeout messages. The label must not contain names of Keras
                layers, because the numbers in these names may differ between ranks.
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
            values: Tensors with the samples of this rank, or with one sample of zeros if the rank
                has no samples.
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
        """Call a collective function; the results have the dtypes of `like`, or of `values`."""
        self._number += 1
        call = f"collective call {self._number} of the step: {what}"

        def call_in_order(*local: np.ndarray) -> list[np.ndarray]:
            for optimizer in distributed_optimizers(self._model):
                optimizer.exchange.service.settle()  # only one thread at a time may call MPI
            # Busy waiting does no harm, because the step waits anyway.
            self._communicator.wait_policy.polite = False
            return collective(call, *local)

        # All earlier updates of variables in this step must precede the collective call, wherever
        # the updates were traced.
        updates = [tf.convert_to_tensor(tensor) for tensor in self._updated]
        with tf.control_dependencies([*self.dependencies(), *updates]):
            types = [tensor.dtype for tensor in like or values]
            result = tf.numpy_function(call_in_order, values, types)
        results = (
            [result] if tf.is_tensor(result) else list(result)
        )  # in eager mode, a single result is not in a list
        self._last, self._updated = results[0], []
        return results

    def differentiable(self, values: tf.Tensor, rows: tf.Tensor, label: str) -> tf.Tensor:
        r"""Return the sum \(\sum_s v_s\) of the values of all ranks s, with gradients.

        The gradient exchange computes \(\sum_s b_s g_s / \sum_s b_s\), where rank s has \(b_s\)
        samples and the gradient \(g_s\). The gradient on rank r through this sum must then be
        \(\sum_s b_s u_s / b_r\), where \(u_s\) is the upstream gradient on rank s. With this
        gradient, the exchange gives the gradient of the mean loss of all ranks.

        Args:
            values: A vector; its length is the same on all ranks.
            rows: Scalar: the number of samples \(b_r\) in the batch of this rank r.
            label: Name of the sum in timeout messages, as for `total`.
        """
        weight = tf.cast(rows, values.dtype)

        def add_up(local: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(upstream: tf.Tensor) -> tf.Tensor:
                total = self.total(tf.math.multiply_no_nan(upstream, weight), f"{label}, backwards")
                return tf.math.divide_no_nan(total, weight)

            return self.total(local, label), back

        return tf.custom_gradient(add_up)(values)
