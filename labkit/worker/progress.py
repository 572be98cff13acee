"""The position (epoch and step) in a training, from which the training can resume."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np


class Position(NamedTuple):
    """A position in a training: completed epochs, and completed steps of the current epoch."""

    epoch: int = 0
    step: int = 0

    def done(self, steps: int | None) -> int:
        """Return the steps since training began, or since the epoch began if `steps` is None."""
        return self.step if steps is None else self.epoch * steps + self.step


class Progress(keras.callbacks.Callback):
    """Tracks the position in a training, and the Keras metrics of an interrupted epoch.

    This callback runs after the user's callbacks, so what they change after a step counts as part
    of the step.

    Args:
        steps: Number of training steps per epoch. None: an epoch lasts until the data end.

    Attributes:
        position: Number of completed epochs, and of completed steps in the current epoch, on this
            rank.
        taken: Total number of completed steps over all epochs.
        metrics: States of the Keras metrics at this position, saved by an interrupted training.
        losses: Pairs (loss, rows) of the steps in this epoch; only strategies with their own
            training step fill this list.
    """

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self._steps = steps
        self.position, self.taken = Position(), 0
        self.metrics: list[np.ndarray] = []
        self.losses: list[tuple[float, int]] = []

    def save_metrics(self) -> None:
        """Save the metric states, so that an interrupted epoch can resume with them."""
        self.metrics = [v.numpy().copy() for v in self.model.metrics_variables]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restore the metric states if the epoch was interrupted."""
        if self.position.step and self.metrics:
            variables = self.model.metrics_variables
            for variable, value in zip(variables, self.metrics, strict=True):
                variable.assign(value)
        self.metrics = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Advance the position by one training step."""
        self.position = Position(self.position.epoch, self.position.step + 1)
        self.taken += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Advance to the next epoch, unless training stopped in the middle of this epoch."""
        if not self.model.stop_training or self.position.step == self._steps:
            self.position, self.losses = Position(epoch + 1), []
