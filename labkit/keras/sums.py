"""Sums over the ranks in the middle of a training step, in one order on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from labkit.common.errors import InvalidInput
from labkit.communicator import Communicator
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
        self._number = 0  # of sums in the step that is traced
        self.within = False
        self.named: set[str] = set()

    @contextmanager
    def step(self, is_part: bool) -> Iterator[None]:
        """While a step is traced, know whether its batch is a part of one of all ranks."""
        self._last, self._number, self.within = None, 0, is_part
        try:
            yield
        finally:
            self.within = False

    def before(self) -> list[tf.Tensor]:
        """What the next meeting of the ranks must wait for."""
        if self._last is None or not tf.inside_function():
            return []
        if self._last.graph is not tf.compat.v1.get_default_graph():
            raise InvalidInput(
                "sums over the ranks inside a loop or a branch of the model (a synchronized "
                "BatchNormalization in TimeDistributed or a recurrent layer) have no order that "
                "all ranks keep; take synchronized=False there"
            )
        return [self._last]

    def total(self, values: tf.Tensor, what: str) -> tf.Tensor:
        r"""The sum \(\sum_s v_s\), as a constant: no gradient goes through it.

        Args:
            values: a vector of this rank, as long on all.
            what: for messages, if a rank does not come; without names of Keras, which counts them
                and may be further on one rank than on another.
        """
        self._number += 1
        call = f"sum {self._number} of the step: {what}"

        def add_up(own: np.ndarray) -> np.ndarray:
            for optimizer in distributed_optimizers(self._model):
                optimizer.exchange.service.settle()  # one thread at a time
            self._communicator.patience.polite = False  # the step stands still
            return self._communicator.tally(own, call).astype(own.dtype)

        with tf.control_dependencies(self.before()):
            found = tf.ensure_shape(tf.numpy_function(add_up, [values], values.dtype), values.shape)
        self._last = found
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
