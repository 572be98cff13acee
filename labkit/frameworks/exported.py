"""A training as data: layers, weights, batches and optimizer, for a process that has only NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
    ) -> None:
        """Write the arrays.

        Args:
            samples: x and y; None where another worker writes them.
            weights: in Keras's order, (in, out) and (y, x, in, out).
            batches: the rows of each step.
            shares: of each step, the part of all workers' rows that is this worker's.
        """
        for file, array in zip(self.samples, samples or (), strict=False):
            np.save(file, array)
        ends = np.cumsum([len(rows) for rows in batches])
        rows = np.concatenate(batches)
        # Those without names are called arr_0, arr_1, …
        np.savez(self.own, *weights, rows=rows, ends=ends, shares=np.array(shares))


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
            self._factors = own["shares"] * told.size
        # Mapped, not read: all workers look at the same pages.
        self._x, self._y = (np.load(file, mmap_mode="r") for file in told.samples)
        self._number = 0

    def next(self) -> tuple[np.ndarray, np.ndarray, float]:
        """x, y, and the factor of this worker's mean loss, with which the mean over workers is
        that over rows."""
        rows, factor = self._rows[self._number], float(self._factors[self._number])
        self._number += 1
        return self._x[rows], self._y[rows], factor
