"""A training as data: layers, weights, batches and optimizer, for a process that has only NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

# Keras's name of a layer and its options, such as ("Dense", {"units": 10, "activation": "linear"}).
Layer: TypeAlias = "tuple[str, dict[str, int | str | bool | tuple[int, ...]]]"


@dataclass(frozen=True)
class Exported:
    """What such a process is told.

    Attributes:
        rank, size: of the worker, and how many there are.
        layers: of a sequential model; weights and images lie as Keras has them, channels last.
        shape: of a sample.
        loss: Keras's name of it; scores are logits.
        optimizer: `learning_rate`, `momentum` and `nesterov` of stochastic gradient descent.
        dtype: of weights and of what is computed.
        folder: where arrays are; it is gone when training ends.
    """

    rank: int
    size: int
    layers: list[Layer]
    shape: tuple[int, ...]
    loss: str
    optimizer: dict[str, float]
    dtype: str
    folder: str

    @property
    def samples(self) -> tuple[Path, Path]:
        """Files of x and y, which all workers read."""
        return Path(self.folder) / "x.npy", Path(self.folder) / "y.npy"

    @property
    def own(self) -> Path:
        """The file of what only this worker reads: its weights at the start, and its batches."""
        return Path(self.folder) / f"worker-{self.rank}.npz"

    def write(
        self,
        samples: tuple[np.ndarray, np.ndarray] | None,
        weights: list[np.ndarray],
        batches: list[np.ndarray],
        shares: list[float],
        most: list[int],
    ) -> None:
        """Write the arrays.

        Args:
            samples: x and y; None where another worker writes them.
            weights: in Keras's order, (in, out) and (y, x, in, out).
            batches: the rows of each step.
            shares: of each step, the part of all workers' rows that is this worker's.
            most: of each step, the rows of the worker that has most.
        """
        for file, array in zip(self.samples, samples or (), strict=False):
            np.save(file, array)
        ends = np.cumsum([len(rows) for rows in batches])
        rows = np.concatenate(batches)
        # Those without names are called arr_0, arr_1, …
        shares_of, most_of = np.array(shares), np.array(most)
        np.savez(self.own, *weights, rows=rows, ends=ends, shares=shares_of, most=most_of)


class Batches:
    """On the other side: weights at the start, and one batch after the other.

    Attributes:
        weights: as Keras has them.
    """

    def __init__(self, told: Exported) -> None:
        with np.load(told.own) as own:
            count = sum(name.startswith("arr_") for name in own.files)
            self.weights = [own[f"arr_{number}"] for number in range(count)]
            self._rows = np.split(own["rows"], own["ends"][:-1])
            self._shares, self._most, self._size = own["shares"], own["most"], told.size
        # Mapped, not read: all workers look at the same pages.
        self._x, self._y = (np.load(file, mmap_mode="r") for file in told.samples)
        self._number = 0

    def next(self) -> tuple[np.ndarray, np.ndarray, float]:
        """x, y, and the factor of this worker's mean loss, with which the mean over workers is
        that over rows."""
        rows, factor = self._rows[self._number], float(self._shares[self._number]) * self._size
        self._number += 1
        return self._x[rows], self._y[rows], factor

    def next_level(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x, y, and of each row its part in the mean over all workers' rows.

        All workers have equally many rows: some are there twice, and the second time weigh nothing.
        """
        rows, share = self._rows[self._number], float(self._shares[self._number])
        more = np.resize(rows, self._most[self._number])
        self._number += 1
        parts = np.where(np.arange(len(more)) < len(rows), share / len(rows), 0.0)
        return self._x[more], self._y[more], parts


class Training(Protocol):
    """On the other side: what a framework's process is asked for."""

    def open(self) -> int:
        """The port at which all workers meet; asked of the first one."""

    def join(self, port: int) -> None:
        """Meet the others."""

    def step(self) -> float:
        """Train on the next batch; the mean loss of this worker's rows."""

    def weights(self) -> list[np.ndarray]:
        """As Keras has them; asked of all workers at once."""

    def describe(self) -> tuple[str, str]:
        """What of the framework trains, and its version."""


def calls(training: Training) -> Mapping[str, Callable[..., object]]:
    """What it answers, by name."""
    asked = (training.open, training.join, training.step, training.weights, training.describe)
    return {call.__name__: call for call in asked}
