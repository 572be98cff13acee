"""Sums over the ranks in the middle of a training step, in one order on all of them."""

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


class Sums:
    """What a step adds up over the ranks before its gradients travel.

    TensorFlow runs operations in any order that their data allow, and ranks must meet in the same:
    each sum waits for the one that was traced before it, and the exchange for the last.

    Args:
        model: with a distributed optimizer.
        communicator: the ranks.

    Attributes:
        within: a step is traced whose batch is a part.
        named: losses of which the user has been told.
    """

    def __init__(self, model: keras.Model, communicator: Communicator) -> None:
        self._model, self._communicator = model, communicator
        self._last: tf.Tensor | None = None  # sum that was traced
        self._number = 0  # of meetings in the step that is traced
        self._updated: list[keras.Variable] = []  # by exchanges since the last meeting
        self._gathered: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}  # by identity: part and whole
        self.within = False
        self.named: set[str] = set()

    @contextmanager
    def step(self, is_part: bool) -> Iterator[None]:
        """While a step is traced, know whether its batch is a part of one of all ranks."""
        self._last, self._number, self.within = None, 0, is_part
        self._updated, self._gathered = [], {}
        try:
            yield
        finally:
            self.within = False
            self._gathered = {}

    def before(self) -> list[tf.Tensor]:
        """What the next meeting of the ranks must wait for."""
        if self._last is None or not tf.inside_function():
            return []
        if self._last.graph is not tf.compat.v1.get_default_graph():
            raise InvalidInput(
                "sums over the ranks inside a loop or a branch of the model (a synchronized "
                "BatchNormalization in TimeDistributed or a recurrent layer) have no order that "
                "all ranks keep; take synchronized=False there, and update metrics outside"
            )
        return [self._last]

    def follow(self, variables: Sequence[keras.Variable]) -> None:
        """Meet next when these have been updated: the exchange has then ended."""
        self._updated += variables

    def total(self, values: tf.Tensor, what: str) -> tf.Tensor:
        r"""The sum \(\sum_s v_s\), as a constant: no gradient goes through it.

        Args:
            values: a vector of this rank, as long on all.
            what: for messages, if a rank does not come; without names of Keras, which counts them
                and may be further on one rank than on another.
        """

        def add_up(call: str, own: np.ndarray) -> list[np.ndarray]:
            return [self._communicator.tally(own, call).astype(own.dtype)]

        (total,) = self._meet(add_up, [values], what)
        return tf.ensure_shape(total, values.shape)

    def mean(self, numbers: Sequence[tf.Tensor], rows: Rows, what: str) -> list[tf.Tensor]:
        """The ranks' means of numbers, by rows."""
        counted = tf.cast(rows, tf.float64)
        parts = [tf.math.multiply_no_nan(tf.cast(each, tf.float64), counted) for each in numbers]
        whole, *totals = tf.unstack(self.total(tf.stack([counted, *parts]), what))
        means = [tf.math.divide_no_nan(total, whole) for total in totals]
        return [tf.cast(mean, each.dtype) for mean, each in zip(means, numbers, strict=True)]

    def gather(self, values: Sequence[tf.Tensor], rows: Rows, what: str) -> list[tf.Tensor]:
        """The rows of all ranks, in their order; each value travels once in a step.

        Args:
            values: of the rows of this rank; of a stand-in where it has none.
            rows: how many it has.
            what: as for `total`.
        """

        def join(call: str, count: np.ndarray, *own: np.ndarray) -> list[np.ndarray]:
            parts = self._communicator.allgather([v if count else v[:0] for v in own], call)
            return [np.concatenate(column) for column in zip(*parts, strict=True)]

        new = [value for value in values if id(value) not in self._gathered]
        if new:
            joined = self._meet(join, [tf.cast(rows, tf.int64), *new], what, new)
            for value, whole in zip(new, joined, strict=True):
                if value.shape.rank:
                    whole.set_shape([None, *value.shape[1:]])
                self._gathered[id(value)] = value, whole
        return [self._gathered[id(value)][1] for value in values]

    def _meet(
        self,
        together: Callable[..., list[np.ndarray]],
        values: list[tf.Tensor],
        what: str,
        like: Sequence[tf.Tensor] = (),
    ) -> list[tf.Tensor]:
        """What comes of values of all ranks, of the same types as they or as others."""
        self._number += 1
        call = f"meeting {self._number} of the step: {what}"

        def meet(*own: np.ndarray) -> list[np.ndarray]:
            for optimizer in distributed_optimizers(self._model):
                optimizer.exchange.service.settle()  # one thread at a time
            self._communicator.patience.polite = False  # the step stands still
            return together(call, *own)

        # What is read here was written before, wherever in the step that was.
        updates = [tf.convert_to_tensor(each) for each in self._updated]
        with tf.control_dependencies([*self.before(), *updates]):
            types = [each.dtype for each in like or values]
            result = tf.numpy_function(meet, values, types)
        found = [result] if tf.is_tensor(result) else list(result)  # eagerly, one comes bare
        self._last, self._updated = found[0], []
        return found

    def differentiable(self, values: tf.Tensor, rows: tf.Tensor, what: str) -> tf.Tensor:
        r"""The sum \(\sum_s v_s\), and the gradient of the ranks' mean loss through it.

        The exchange takes \(\sum_s b_s g_s / \sum_s b_s\). That of rank r through a sum is
        therefore \(\sum_s b_s u_s / b_r\) with \(u_s\) what came back to the sum on rank s.

        Args:
            values: a vector of this rank, as long on all.
            rows: scalar, the samples \(b_r\) behind this rank's gradients.
            what: for messages.
        """
        weight = tf.cast(rows, values.dtype)

        def add_up(own: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
            def back(upstream: tf.Tensor) -> tf.Tensor:
                total = self.total(tf.math.multiply_no_nan(upstream, weight), f"{what}, backwards")
                return tf.math.divide_no_nan(total, weight)

            return self.total(own, what), back

        return tf.custom_gradient(add_up)(values)
