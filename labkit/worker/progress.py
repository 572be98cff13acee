"""How far training has come: where it may be taken up again."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np


class Position(NamedTuple):
    """A place in training: whole epochs, and steps of the one that has been begun."""

    epoch: int = 0
    step: int = 0

    def done(self, steps: int | None) -> int:
        """Steps since the begin of training; of the epoch alone, where none knows its length."""
        return self.step if steps is None else self.epoch * steps + self.step


class Progress(keras.callbacks.Callback):
    """Keeps the position, and what the metrics of an epoch know when it is taken up again.

    It comes after callbacks of the user's own: what they change in a step belongs to it.

    Args:
        steps: of an epoch; None: until its data end.

    Attributes:
        position: all steps before it have been taken, by this rank.
        taken: steps, of all epochs.
        metrics: the states of the metrics at the position, from a training that was broken off.
        losses: of this epoch's steps, with the rows of each, by which Keras weights them; where
            steps are a strategy's own.
    """

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self._steps = steps
        self.position, self.taken = Position(), 0
        self.metrics: list[np.ndarray] = []
        self.losses: list[tuple[float, int]] = []

    def hold(self) -> None:
        """Note what the metrics know by now: this epoch will be taken up again."""
        self.metrics = [v.numpy().copy() for v in self.model.metrics_variables]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Let the metrics of an epoch that had been begun go on from where they were."""
        if self.position.step and self.metrics:
            own = self.model.metrics_variables
            for variable, value in zip(own, self.metrics, strict=True):
                variable.assign(value)
        self.metrics = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """One step further."""
        self.position = Position(self.position.epoch, self.position.step + 1)
        self.taken += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch is over, unless training was ended in its midst."""
        if not self.model.stop_training or self.position.step == self._steps:
            self.position, self.losses = Position(epoch + 1), []
