"""Division of a batch into micro-batches: by rows, or by time steps of all rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import keras

from labkit.common.errors import InvalidInput
from labkit.common.rows import cut
from labkit.model_parallel.functional import Nest
from labkit.model_parallel.losses import LossTargets
from labkit.schedules.pipeline import time_segments

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf

Rows: TypeAlias = "tf.Tensor | npt.NDArray[np.generic]"


class Batch(NamedTuple):
    """Inputs, targets and sample weights (or None), with one row per sample.

    x is a list if there are several inputs; targets and weights are nested as Keras expects.
    """

    x: Rows | list[Rows]
    y: Nest
    weight: Nest | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        return len(keras.tree.flatten(self.x)[0])


class MicroBatches:
    """A batch divided into micro-batches of consecutive rows.

    Args:
        batch: The batch to divide.
        count: Number of micro-batches; their sizes differ by at most one row, and some may be
            empty.
    """

    def __init__(self, batch: Batch, count: int) -> None:
        self._x, self._y, self._weight = batch
        self._rows, self._edges = batch.rows, cut(batch.rows, [1.0] * count)

    def rows(self, number: int) -> int:
        """Return the number of rows of a micro-batch."""
        return self._edges[number + 1] - self._edges[number]

    def share(self, number: int) -> float:
        """Return the weight of a micro-batch, which is its fraction of the batch's rows."""
        return self.rows(number) / self._rows

    def reaches(self, number: int, stage: int) -> bool:
        """Return whether a stage receives any data of a micro-batch."""
        return self.rows(number) > 0

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Return the lengths of the first axes of a stage's input for a micro-batch."""
        return (self.rows(number),)

    def input(self, number: int) -> Nest:
        """Return the inputs of a micro-batch."""
        return self._part(self._x, number)

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Return the targets and sample weights of a micro-batch, which the last stage needs."""
        return self._part(self._y, number), self._part(self._weight, number)

    def loss_targets(self, masks: Sequence[Rows | None]) -> tuple[list[LossTargets], list[float]]:
        """Return `LossTargets` and the weight of each micro-batch that has an output."""
        numbers = range(len(self._edges) - 1)
        parts = [[self._part(mask, n) for mask in masks] for n in numbers]
        targets = [LossTargets(*self.targets(n), parts[n], self._steps_of(n)) for n in numbers]
        return targets, [self.share(n) for n in numbers]

    def _steps_of(self, number: int) -> int | None:
        """Return the number of time steps of a micro-batch; None if it has all time steps."""
        return None

    def _part(self, value: Nest | None, number: int) -> Nest | None:
        rows = slice(self._edges[number], self._edges[number + 1])
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[rows], value)


class TimeSegments(MicroBatches):
    """A batch of sequences divided into segments of time steps; each segment contains all rows.

    Args:
        batch: A batch with inputs (rows, steps, …). Sample weights have shape (rows, steps) or
            (rows, 1), or (rows,) if the model has one output per sequence.
        count: Number of segments; their lengths differ by at most one step.
        opened: For the input of each stage, and then for the model's output, whether the tensor is
            a sequence. Between stages, tensors that are not sequences are sent only for the last
            segment.

    Raises:
        InvalidInput: If there are fewer time steps than segments, if the targets lack a value per
            time step, or if the sample weights have another shape.
    """

    def __init__(self, batch: Batch, count: int, opened: Sequence[bool]) -> None:
        # Only models with one input and one output can be divided by time, so the batch has one
        # input and one target.
        x: tf.Tensor = batch.x
        y: tf.Tensor = batch.y
        weight: tf.Tensor = batch.weight
        self._x, self._y, self._weight, self._opened = x, y, weight, opened
        self._edges = time_segments(x.shape[1], count)
        self._steps, self._last = x.shape[1], count - 1
        if opened[-1] and (len(y.shape) < 2 or y.shape[1] != self._steps):
            raise InvalidInput(
                f"the model has an output for each of {self._steps} steps, but targets have shape "
                f"{[None, *y.shape[1:]]}; give one target per step, or set "
                "return_sequences=False in the last recurrent layer"
            )
        if opened[-1] and weight is not None and len(weight.shape) < 2:
            raise InvalidInput(
                "sample weights of shape [None] would weight time steps, not rows, because the "
                "model has an output for each step; give shape [None, 1], or one weight per step"
            )

    def rows(self, number: int) -> int:
        """Return the number of rows of each segment, which is that of the whole batch."""
        return len(self._x)

    def share(self, number: int) -> float:
        """Return the weight of a segment, which is its fraction of the time steps."""
        return self._length(number) / float(self._steps)

    def reaches(self, number: int, stage: int) -> bool:
        """Return whether a stage receives any data of a segment."""
        return len(self._x) > 0 and (self._opened[stage] or number == self._last)

    def size(self, number: int, stage: int) -> tuple[int, ...]:
        """Return a stage's input size: (rows,), or (rows, steps) if the input is a sequence."""
        return (len(self._x), *([self._length(number)] if self._opened[stage] else []))

    def targets(self, number: int) -> tuple[Nest, Nest | None]:
        """Return the targets for a segment's time steps; all targets if the output has no steps."""
        y: tf.Tensor = self._y
        weight: tf.Tensor = self._weight
        if self._opened[-1]:
            y = self._part(y, number)
            if weight is not None and weight.shape[1:2] == (self._steps,):
                weight = self._part(weight, number)
        return y, weight

    def loss_targets(self, masks: Sequence[Rows | None]) -> tuple[list[LossTargets], list[float]]:
        """Return the targets and the weight of each segment for which the model has an output."""
        if self._opened[-1]:
            return super().loss_targets(masks)
        return [LossTargets(self._y, self._weight, masks)], [1.0]

    def _steps_of(self, number: int) -> int:
        return self._length(number)

    def _length(self, number: int) -> int:
        return self._edges[number + 1] - self._edges[number]

    def _part(self, value: Rows | None, number: int) -> Rows | None:
        edges = slice(self._edges[number], self._edges[number + 1])
        return None if value is None else value[:, edges]
