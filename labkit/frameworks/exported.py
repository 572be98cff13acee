"""A training task as plain data (layers, weights, batches, optimizer), readable with NumPy only.

The functions `model_of` and `loss_of` build the exported model and loss with the caller's Keras.
The caller's Keras may run on another TensorFlow or on JAX. This module does not import Keras;
callers pass their Keras module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

# A layer is its Keras class name and its options, such as ("Dense", {"units": 10, "activation":
# "linear"}).
Layer: TypeAlias = "tuple[str, dict[str, int | str | bool | tuple[int, ...]]]"


@dataclass(frozen=True)
class Exported:
    """The training task that a worker's process receives, together with the framework's name.

    Attributes:
        rank, size: Rank of the worker, and total number of workers.
        layers: Layers of a sequential model, in Keras's layout of weights and images (channels
            last).
        shape: Shape of one input sample.
        loss: Keras's class name of the loss function. The model's outputs are logits.
        optimizer: Options `learning_rate`, `momentum` and `nesterov` of stochastic gradient
            descent.
        dtype: Dtype of the weights and of the computation, such as "float32".
        folder: Folder of the array files, which is removed when training ends.
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
        """The files of the inputs x and the targets y, which all workers read."""
        return Path(self.folder) / "x.npy", Path(self.folder) / "y.npy"

    @property
    def worker_file(self) -> Path:
        """The file that only this worker reads, with its initial weights and batches."""
        return Path(self.folder) / f"worker-{self.rank}.npz"

    def write(
        self,
        samples: tuple[np.ndarray, np.ndarray] | None,
        weights: list[np.ndarray],
        batches: list[np.ndarray],
        shares: list[float],
        most_rows: list[int],
    ) -> None:
        """Write the arrays of this worker, and also the samples if they are given.

        Args:
            samples: Inputs x and targets y of all workers; None if another worker writes these
                arrays.
            weights: Initial weights in Keras's order and layout: (in, out) and (y, x, in, out).
            batches: Sample indices of this worker's batch in each step.
            shares: This worker's fraction of the samples in each step's global batch.
            most_rows: For each step, the number of samples in the largest batch of any worker.
        """
        for file, array in zip(self.samples, samples or (), strict=False):
            np.save(file, array)
        boundaries = np.cumsum([len(rows) for rows in batches])
        rows = np.concatenate(batches)
        # `np.savez` names positional arrays arr_0, arr_1, …; the weights are passed as positional
        # arrays.
        shares_of, most_of = np.array(shares), np.array(most_rows)
        np.savez(
            self.worker_file, *weights, rows=rows, ends=boundaries, shares=shares_of, most=most_of
        )


class Batches:
    """The reader of the arrays that `Exported.write` wrote, for use in a worker's process.

    Attributes:
        weights: Initial weights in Keras's layout.
    """

    def __init__(self, exported: Exported) -> None:
        with np.load(exported.worker_file) as arrays:
            count = sum(name.startswith("arr_") for name in arrays.files)
            self.weights = [arrays[f"arr_{number}"] for number in range(count)]
            self._rows = np.split(arrays["rows"], arrays["ends"][:-1])
            self._shares, self._most, self._size = arrays["shares"], arrays["most"], exported.size
        # The sample files are memory-mapped, so that all workers share the same memory pages.
        self._x, self._y = (np.load(file, mmap_mode="r") for file in exported.samples)
        self._number = 0

    def next(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return inputs x, targets y, and the factor that multiplies this worker's mean loss.

        Batches of workers may differ in size. The factor makes the mean loss over workers equal the
        mean over all samples.
        """
        rows, factor = self._rows[self._number], float(self._shares[self._number]) * self._size
        self._number += 1
        return self._x[rows], self._y[rows], factor

    def next_padded(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return x, y, and the weight of each sample in the mean loss over all workers.

        All workers return the same number of samples. Smaller batches are padded with repeated
        samples of weight 0.
        """
        rows, share = self._rows[self._number], float(self._shares[self._number])
        padded_rows = np.resize(rows, self._most[self._number])
        self._number += 1
        parts = np.where(np.arange(len(padded_rows)) < len(rows), share / len(rows), 0.0)
        return self._x[padded_rows], self._y[padded_rows], parts


class FrameworkTraining(Protocol):
    """The requests that the child process of each framework answers."""

    def open(self) -> int:
        """Return the port through which all workers join; only the first worker is asked."""

    def join(self, port: int) -> None:
        """Join the other workers through the port that the first worker opened."""

    def step(self) -> float:
        """Train on the next batch, and return the mean loss of this worker's samples."""

    def weights(self) -> list[np.ndarray]:
        """Return trained weights in Keras's layout; all workers must answer at the same time."""

    def describe(self) -> tuple[str, str]:
        """Return the name of the framework's training class or function, and its version."""


def calls(training: FrameworkTraining) -> Mapping[str, Callable[..., object]]:
    """Return a mapping from the name of a request to the function that answers the request."""
    methods = (training.open, training.join, training.step, training.weights, training.describe)
    return {call.__name__: call for call in methods}


def model_of(exported: Exported, weights: list[np.ndarray], keras: Any) -> Any:
    """Return the exported model with the given weights, built with the caller's Keras module."""
    layers = [getattr(keras.layers, kind)(**options) for kind, options in exported.layers]
    model = keras.Sequential([keras.Input(exported.shape), *layers])
    model.set_weights(weights)
    return model


def loss_of(exported: Exported, keras: Any, **more: str) -> Any:
    """Return the exported loss function, built with the caller's Keras module; it takes logits."""
    options = {"SparseCategoricalCrossentropy": {"from_logits": True}}.get(exported.loss, {})
    return getattr(keras.losses, exported.loss)(**options, **more)
