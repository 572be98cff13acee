"""What a world without values computes: gradients and predictions as long as they would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.forecast.meta_vector import MetaVector
from labkit.programs import Gradient
from labkit.programs.actions import Passed, Place, Vector
from labkit.programs.event_log import Row


class HollowStage:
    """Computes hollow gradients, and notes when steps end; see `labkit.programs.event_log.Scenes`.

    Args:
        rows: of each worker's batches.
        size, dtype: of the weights.
        slots: values that an optimizer keeps for each of them.
        soft: values that the model gives for a row.

    Attributes:
        now: tells the time, s.
        rows: of steps, with when each was over.
    """

    def __init__(self, rows: Sequence[int], size: int, dtype: str, slots: int, soft: float) -> None:
        self._rows, self._size, self._dtype = rows, size, dtype
        self._slots, self._soft = slots, soft
        self._steps = [0] * len(rows)
        self.now: Callable[[], float] = lambda: 0.0
        self.rows: list[tuple[float, Row]] = []  # by when they were over

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Of a worker's next batch."""
        step, self._steps[worker] = self._steps[worker], self._steps[worker] + 1
        return Gradient(self._of(self._size), self._rows[worker], 1.0, step)

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """The same."""
        return self.gradient(worker, weights)

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """As long as the model's outputs."""
        found: Vector = self._of(round(self._soft * self._rows[worker]))
        return found

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """A row a block."""
        return Gradient(self._of(self._size * (len(ends) - 1)), self._rows[worker], 0.0, 0)

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        raise InvalidInput("a forecast does not know what members of a replica pass on; see there")

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        raise InvalidInput("a forecast does not know what members of a replica pass on; see there")

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """As long as the gradient."""
        return gradient

    def states(self, worker: int) -> Vector:
        """As long as the optimizer's slots."""
        found: Vector = self._of(self._slots * self._size)
        return found

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """As they are."""
        return weights

    def forget(self, worker: int) -> None:
        """There is nothing."""

    def step(self, row: Row) -> None:
        """A worker's step is over."""
        self.rows.append((self.now(), row))

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Nobody looks."""

    def stops(self) -> bool:
        """Nobody wants to."""
        return False

    def _of(self, size: int) -> Any:
        return MetaVector(size, self._dtype)
