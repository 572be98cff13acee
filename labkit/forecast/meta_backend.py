"""A backend for forecasts: gradients and predictions have correct sizes, but no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.common.errors import InvalidInput
from labkit.forecast.meta_vector import MetaVector
from labkit.programs import Gradient
from labkit.programs.actions import Passed, Place, Vector
from labkit.programs.event_log import Row


class MetaBackend:
    """A backend that returns vectors without values, and records when each step ends.

    The methods are those of `labkit.programs.event_log.Backend`.

    Args:
        rows: Number of samples in each worker's batches, by worker.
        size, dtype: Number and dtype of the weights.
        slots: Number of values that the optimizer stores per weight.
        soft: Number of output values of the model per sample.

    Attributes:
        now: Function that returns the time on the virtual clock, s.
        rows: End time (s) and history row of each step.
    """

    def __init__(self, rows: Sequence[int], size: int, dtype: str, slots: int, soft: float) -> None:
        self._rows, self._size, self._dtype = rows, size, dtype
        self._slots, self._soft = slots, soft
        self._steps = [0] * len(rows)
        self.now: Callable[[], float] = lambda: 0.0
        self.rows: list[tuple[float, Row]] = []

    def gradient(self, worker: int, weights: Vector) -> Gradient:
        """Return a gradient without values for a worker's next batch."""
        step, self._steps[worker] = self._steps[worker], self._steps[worker] + 1
        return Gradient(self._vector(self._size), self._rows[worker], 1.0, step)

    def distilled(self, worker: int, weights: Vector, soft: Vector, share: float) -> Gradient:
        """Return the gradient of a worker's next batch; soft targets do not change the size."""
        return self.gradient(worker, weights)

    def predictions(self, number: int, worker: int, step: int, weights: Vector) -> Vector:
        """Return a vector with the size of the model's outputs."""
        vector: Vector = self._vector(round(self._soft * self._rows[worker]))
        return vector

    def curved(self, worker: int, weights: Vector, ends: Sequence[int]) -> Gradient:
        """Return a vector whose size is the number of weights times the number of blocks."""
        return Gradient(self._vector(self._size * (len(ends) - 1)), self._rows[worker], 0.0, 0)

    def forward(self, place: Place, weights: Vector, values: tuple[Vector, ...]) -> Passed:
        raise InvalidInput(
            "replicas with model parallelism have no forecast; give stages=1 and no grid"
        )

    def backward(self, place: Place, values: tuple[Vector, ...]) -> Gradient:
        raise InvalidInput(
            "replicas with model parallelism have no forecast; give stages=1 and no grid"
        )

    def update(self, holder: int, gradient: Vector, rate: float = 1.0) -> Vector:
        """Return a vector without values that has the size of the gradient."""
        return gradient

    def states(self, worker: int) -> Vector:
        """Return a vector without values that has the size of the optimizer's slots."""
        vector: Vector = self._vector(self._slots * self._size)
        return vector

    def adopt(self, worker: int, weights: Vector, states: Vector | None) -> Vector:
        """Return the weights unchanged."""
        return weights

    def forget(self, worker: int) -> None:
        """Do nothing: the backend stores no state of a worker."""

    def step(self, row: Row) -> None:
        """Record the history row of a completed step, with the time on the virtual clock."""
        self.rows.append((self.now(), row))

    def snapshot(self, epoch: int, holder: int, weights: Vector, now: float) -> None:
        """Do nothing: a forecast evaluates no weights."""

    def stops(self) -> bool:
        """Return False: a forecast never stops early."""
        return False

    def _vector(self, size: int) -> Any:
        return MetaVector(size, self._dtype)
