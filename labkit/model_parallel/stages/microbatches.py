"""What of a batch goes through the stages at a time: rows of it, or time steps of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import keras

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.losses import Aims
from labkit.schedules.pipeline.wavefront import stretches

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf

Rows: TypeAlias = "tf.Tensor | npt.NDArray[np.generic]"


class Batch(NamedTuple):
    """Inputs, targets and sample weights (or None), a row a sample.

    Of several inputs x is a list; targets and weights are as Keras takes them.
    """

    x: Rows | list[Rows]
    y: Nest
    weight: Nest | None = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(keras.tree.flatten(self.x)[0])


class MicroBatches:
    """A batch cut into rows.

    Args:
        batch: what is cut.
        count: of micro-batches, of equal size up to one row; some may be empty.
    """

    def __init__(self, batch: Batch, count: int) -> None:
        self._x, self._y, self._weight = batch
        self._rows, self._edges = batch.rows, cut(batch.rows, [1.0] * count)

    def rows(self, number: int) -> int:
        """How many rows a micro-batch has."""
        return self._edges[number + 1] - self._edges[number]

    def share(self, number: int) -> float:
        """The share of the batch by which a micro-batch counts."""
        return self.rows(number) / self._rows

    def reaches(self, number: int, stage: int) -> bool:
        """Whether a micro-batch has something for a stage."""
        return self.rows(number) > 0

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """The first axes of what a stage takes of it."""
        return (self.rows(number),)

    def input(self, number: int) -> Nest:
        """What is read from the batch."""
        return self._part(self._x, number)

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Targets and sample weights, which the last stage takes."""
        return self._part(self._y, number), self._part(self._weight, number)

    def aims(self, masks: Sequence[Rows | None]) -> tuple[list[Aims], list[float]]:
        """Targets, sample weights and masks of what is answered; and its share in the loss."""
        numbers = range(len(self._edges) - 1)
        parts = [[self._part(mask, n) for mask in masks] for n in numbers]
        found = [Aims(*self.targets(n), parts[n], self._steps_of(n)) for n in numbers]
        return found, [self.share(n) for n in numbers]

    def _steps_of(self, number: int) -> int | None:
        """How many of the time steps a micro-batch has; None: all that there are."""
        return None

    def _part(self, value: Nest | None, number: int) -> Nest | None:
        rows = slice(self._edges[number], self._edges[number + 1])
        return keras.tree.map_structure(lambda each: None if each is None else each[rows], value)


class Stretches(MicroBatches):
    """A batch of sequences cut into stretches of time steps, each with all rows.

    Args:
        batch: inputs (rows, steps, …); weights (rows, steps) or (rows, 1), and (rows,) where the
            model answers once.
        count: of stretches, of equal length up to one step.
        opened: of the input of each stage, and of the output of the last one, whether it is a
            sequence. What is none passes with the last stretch alone.

    Raises:
        InvalidInput: fewer steps than stretches, not a target a step, weights of another shape.
    """

    def __init__(self, batch: Batch, count: int, opened: Sequence[bool]) -> None:
        # Time is open in chains alone: of one input, with one target.
        x: tf.Tensor = batch.x
        y: tf.Tensor = batch.y
        weight: tf.Tensor = batch.weight
        self._x, self._y, self._weight, self._opened = x, y, weight, opened
        self._edges = stretches(x.shape[1], count)
        self._steps, self._last = x.shape[1], count - 1
        if opened[-1] and (len(y.shape) < 2 or y.shape[1] != self._steps):
            raise InvalidInput(
                f"the model answers each of {self._steps} steps, but targets are of shape "
                f"{[None, *y.shape[1:]]}; give one a step, or let the last recurrent layer have "
                "return_sequences=False"
            )
        if opened[-1] and weight is not None and len(weight.shape) < 2:
            raise InvalidInput(
                "sample weights of shape [None] would count steps, not rows, where the model "
                "answers each step; give shape [None, 1], or a weight a step"
            )

    def rows(self, number: int) -> int:
        """Each stretch has all rows of the batch."""
        return len(self._x)

    def share(self, number: int) -> float:
        """A stretch counts by its share of the steps."""
        return self._length(number) / float(self._steps)

    def reaches(self, number: int, stage: int) -> bool:
        """Whether a stretch has something for a stage."""
        return len(self._x) > 0 and (self._opened[stage] or number == self._last)

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Rows, and steps where the stage takes a sequence."""
        return (len(self._x), *([self._length(number)] if self._opened[stage] else []))

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Those of a stretch's steps, where the model answers each step; else all."""
        y: tf.Tensor = self._y
        weight: tf.Tensor = self._weight
        if self._opened[-1]:
            y = self._part(y, number)
            if weight is not None and weight.shape[1:2] == (self._steps,):
                weight = self._part(weight, number)
        return y, weight

    def aims(self, masks: Sequence[Rows | None]) -> tuple[list[Aims], list[float]]:
        """Of each stretch, or of the last one alone, which then counts whole."""
        if self._opened[-1]:
            return super().aims(masks)
        return [Aims(self._y, self._weight, masks)], [1.0]

    def _steps_of(self, number: int) -> int:
        return self._length(number)

    def _length(self, number: int) -> int:
        return self._edges[number + 1] - self._edges[number]

    def _part(self, value: Rows | None, number: int) -> Rows | None:
        edges = slice(self._edges[number], self._edges[number + 1])
        return None if value is None else value[:, edges]
