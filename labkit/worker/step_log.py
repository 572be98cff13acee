"""Logs of gradients and weights in each training step, to compare ranks with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables
from labkit.worker.gradient_log import GradientLog, call_numpy, graph_dependencies

MOST = 2**28  # maximum bytes of a log; later steps are omitted


class LoggedUpdate(NamedTuple):
    """A variable's applied gradient and its new values in one step, as flat float64 arrays."""

    applied: np.ndarray
    weight: np.ndarray


class StepLog(GradientLog):
    """A log of all applied gradients, and of the weights after each training step.

    Attributes:
        steps: For each variable path, the updates of all steps in order.
    """

    def __init__(self) -> None:
        super().__init__(marks=True, sums=False)
        self.steps: dict[str, list[LoggedUpdate]] = {}
        self._pending: list[tuple[str, np.ndarray]] = []
        self._bytes_left = MOST

    @property
    def is_complete(self) -> bool:
        """Whether the log has all steps; otherwise the log has reached its size limit."""
        return self._bytes_left >= 0

    def record_gradients(
        self, names: Sequence[str], scale: float, gradients: Sequence[np.ndarray]
    ) -> None:
        """Record the gradients of a step, see `GradientLog`."""
        super().record_gradients(names, scale, gradients)
        self._pending = [(n, _flat(g) / scale) for n, g in zip(names, gradients, strict=True)]

    def record_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Record the weights after a step, see `GradientLog`."""
        super().record_weights(weights)
        for (name, gradient), weight in zip(self._pending, weights, strict=True):
            self._bytes_left -= 16 * gradient.size
            if self._bytes_left >= 0:
                self.steps.setdefault(name, []).append(LoggedUpdate(gradient, _flat(weight)))


class LocalGradients(NamedTuple):
    """One rank's gradients in a step, as flat arrays by variable, and its number of batch rows."""

    gradients: dict[str, np.ndarray]
    rows: float


class LocalGradientLog(Hook):
    """A hook that logs the gradients of each step as backpropagation has computed them.

    Args:
        model: Model whose gradients are logged.

    Attributes:
        steps: The gradients of each training step, in order.
        first: The weights before the first step, by variable.
        batches: The batch of each training step, in order.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, model: keras.Model) -> None:
        self.steps: list[LocalGradients] = []
        self.first: dict[str, np.ndarray] = {}
        self.batches: list[Batch] = []
        self._variables, self._bytes_left = model.trainable_variables, MOST

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Record the batch of each step; in the first step, also record the initial weights."""
        names, tensors = [variable.path for variable in self._variables], tf.nest.flatten(data)

        def note(*values: np.ndarray) -> None:
            weights, parts = values[: len(names)], values[len(names) :]
            self.first = self.first or dict(zip(names, map(_flat, weights), strict=True))
            self._bytes_left -= sum(part.nbytes for part in parts)
            if self._bytes_left >= 0:
                self.batches.append(tf.nest.pack_sequence_as(data, [part + 0 for part in parts]))

        logged = call_numpy(note, *(variable.value for variable in self._variables), *tensors)
        with tf.control_dependencies(graph_dependencies(logged)):
            return inner(data)

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Record each gradient before ranks exchange their gradients."""
        present = [n for n, gradient in enumerate(gradients) if gradient is not None]
        names = [variables[n].path for n in present] if variables is not None else []

        def note(count: np.ndarray, *values: np.ndarray) -> None:
            self._bytes_left -= 8 * sum(value.size for value in values)
            if self._bytes_left >= 0:
                flat = dict(zip(names, map(_flat, values), strict=False))
                self.steps.append(LocalGradients(flat, float(count)))

        count = tf.cast(1 if rows is None else rows, tf.int64)
        logged = call_numpy(note, count, *(tf.convert_to_tensor(gradients[n]) for n in present))
        with tf.control_dependencies(graph_dependencies(logged)):
            logged_gradients = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
            return inner(logged_gradients, variables)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).astype(np.float64)
