"""All that a rank, or one process, does to its weights step by step, to be held against another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.exchange.hooks import Batch, Hook, Logs, Rows, Variables
from labkit.worker.gradient_log import Applied, call, in_graph

MOST = 2**28  # bytes of notes; later steps are not written down


class Done(NamedTuple):
    """What was done to a variable in one step: flat, in float64."""

    applied: np.ndarray
    weight: np.ndarray


class StepLog(Applied):
    """Notes of every gradient that is applied, and of the weights after it.

    Attributes:
        steps: of each variable.
    """

    def __init__(self) -> None:
        super().__init__(marks=True, sums=False)
        self.steps: dict[str, list[Done]] = {}
        self._under_way: list[tuple[str, np.ndarray]] = []
        self._left = MOST

    @property
    def whole(self) -> bool:
        """Whether nothing was too much to be written down."""
        return self._left >= 0

    def before(self, names: Sequence[str], scale: float, gradients: Sequence[np.ndarray]) -> None:
        """See `Applied`."""
        super().before(names, scale, gradients)
        self._under_way = [(n, _flat(g) / scale) for n, g in zip(names, gradients, strict=True)]

    def after(self, weights: Sequence[np.ndarray]) -> None:
        """See `Applied`."""
        super().after(weights)
        for (name, gradient), weight in zip(self._under_way, weights, strict=True):
            self._left -= 16 * gradient.size
            if self._left >= 0:
                self.steps.setdefault(name, []).append(Done(gradient, _flat(weight)))


class Given(NamedTuple):
    """A rank's part of one step: its gradient of each variable, flat, and the rows behind it."""

    gradients: dict[str, np.ndarray]
    rows: float


class Own(Hook):
    """Notes of each step of a model's seam: gradients as backpropagation has made them.

    Args:
        model: whose.

    Attributes:
        steps: one behind the other.
        first: the weights before the first.
        batches: what was fed in each.
    """

    name: ClassVar[str] = "dense"

    def __init__(self, model: keras.Model) -> None:
        self.steps: list[Given] = []
        self.first: dict[str, np.ndarray] = {}
        self.batches: list[Batch] = []
        self._variables, self._left = model.trainable_variables, MOST

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Write down the weights, once, and what is fed."""
        names, fed = [variable.path for variable in self._variables], tf.nest.flatten(data)

        def note(*values: np.ndarray) -> None:
            weights, parts = values[: len(names)], values[len(names) :]
            self.first = self.first or dict(zip(names, map(_flat, weights), strict=True))
            self._left -= sum(part.nbytes for part in parts)
            if self._left >= 0:
                self.batches.append(tf.nest.pack_sequence_as(data, [part + 0 for part in parts]))

        done = call(note, *(variable.value for variable in self._variables), *fed)
        with tf.control_dependencies(in_graph(done)):
            return inner(data)

    def apply(
        self,
        inner: Callable[..., tf.Tensor],
        rows: Rows,
        gradients: list[tf.Tensor],
        variables: Variables = None,
    ) -> tf.Tensor:
        """Write each gradient down before it goes on."""
        there = [n for n, gradient in enumerate(gradients) if gradient is not None]
        names = [variables[n].path for n in there] if variables is not None else []

        def note(count: np.ndarray, *values: np.ndarray) -> None:
            self._left -= 8 * sum(value.size for value in values)
            if self._left >= 0:
                flat = dict(zip(names, map(_flat, values), strict=False))
                self.steps.append(Given(flat, float(count)))

        count = tf.cast(1 if rows is None else rows, tf.int64)
        done = call(note, count, *(tf.convert_to_tensor(gradients[n]) for n in there))
        with tf.control_dependencies(in_graph(done)):
            noted = tf.nest.map_structure(tf.identity, gradients, expand_composites=True)
            return inner(noted, variables)


def _flat(values: np.ndarray) -> np.ndarray:
    return values.reshape(-1).astype(np.float64)
