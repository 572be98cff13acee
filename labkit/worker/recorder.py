"""A callback that records one history row per training step of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange import Timeline
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, hooks_of

Row = dict[str, float]
SEND_EVERY = 0.25  # The recorder waits at least `SEND_EVERY` seconds between two reports.
# All ranks act on a rank's request `AHEAD` steps after the request. With priority scheduling, a
# rank may be one step ahead of another rank. The delay of a request therefore exceeds one step.
AHEAD = 2


class Recorder(keras.callbacks.Callback, Hook):
    """A callback that times each step, counts its traffic, and stops all ranks at the same step.

    The seconds of a step include computation, waiting for other ranks, and the exchange. The
    seconds of a step exclude validation and the user's callbacks. The loss of a step is computed on
    the rows of this rank. The loss is read within the training step, because Keras's logs contain
    only running means.

    Args:
        communicator: Communicator of the ranks, whose traffic is recorded.
        report: Function (kind, records), called at most every 0.25 seconds. The function receives
            new history rows as kind "step", and metrics as kind "epoch".
        stop_asked: Function that rank 0 calls to learn whether a user has asked to stop.

    Attributes:
        rows, epochs: The history rows of all steps so far, and the metrics of all epochs so far.
        begin: Number of training steps that precede the first history row.
    """

    name: ClassVar[str] = "record"

    def __init__(
        self,
        communicator: Communicator,
        report: Callable[[str, list[Row]], None],
        stop_asked: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.report = report
        self.stop_asked = stop_asked
        self.rows: list[Row] = []
        self.epochs: list[dict[str, float]] = []
        self.begin = 0
        self.stopped = False
        self.timeline: Timeline | None = None
        # The attribute `_compressed` is the compressed reduction of the exchange, or None.
        self._compressed: Any = None
        self._codec = 0.0
        self._loss = tf.Variable(float("nan"), dtype=tf.float64, trainable=False)
        self._samples = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._sent, self._sent_epochs, self._sent_at, self._epoch = 0, 0, 0.0, 0
        self._polled_at = 0.0

    def set_model(self, model: Any) -> None:
        """Install the hook that reads loss and row count inside the training step."""
        super().set_model(model)
        exchange = getattr(model.optimizer, "exchange", None)
        if exchange is not None:
            self.timeline = exchange.timeline
        self._compressed = exchange.compressed if exchange is not None else None
        hooks_of(model).add_hook(self)

    @property
    def step(self) -> int:
        """Number of the next training step, counted from 0."""
        return self.begin + len(self.rows)

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Record the number of rows of the batch."""
        self._samples.assign(tf.cast(rows, tf.int64))
        return inner(data)

    def compute_loss(
        self, inner: Callable[..., tf.Tensor], rows: Rows, *arguments: tf.Tensor, **named: tf.Tensor
    ) -> tf.Tensor:
        """Record the loss of a training step."""
        value = inner(*arguments, **named)
        if named.get("training", True):
            self._loss.assign(tf.cast(value, tf.float64))
        return value

    @property
    def loss(self) -> float:
        """Loss of this rank's rows in the current step; NaN before the first loss."""
        return float(self._loss.numpy())

    def note(self, loss: float | None, samples: int) -> None:
        """Record the loss (None if unknown to this rank) and the row count of a step."""
        self._loss.assign(math.nan if loss is None else loss)
        self._samples.assign(0 if loss is None else samples)

    def on_train_end(self, logs: Any = None) -> None:
        """Report the remaining history rows, and remove the hook from the training step."""
        self._send(self.communicator.clock.now())
        hooks_of(self.model).remove_hooks(self.name)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Store the number of the epoch for the history rows of its steps."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Record the metrics of the epoch and the training time so far."""
        seconds = sum(row["seconds"] for row in self.rows)
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.epochs.append({"epoch": epoch, "step": self.step, "seconds": seconds} | metrics)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the time and the traffic counters when a step starts."""
        self._before = self.communicator.traffic.copy()
        if self.timeline is not None:
            self.timeline.step = self.step
        self._start = self.communicator.clock.now()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Add the history row of the step; stop if rank 0 has requested a stop at this step."""
        loss = float(self._loss.numpy())  # Reading the loss waits until the step has finished.
        now = self.communicator.clock.now()
        if self.timeline is not None:
            self.timeline.add("step", -1, self._start)
        traffic = self.communicator.traffic.since(self._before)
        seconds = now - self._start - traffic.aside_seconds
        samples = int(self._samples.numpy())
        codec_total = self._compressed.seconds if self._compressed is not None else 0.0
        codec, self._codec = codec_total - self._codec, codec_total
        # A custom train_step computes the loss elsewhere, so the loss comes from Keras's logs.
        if math.isnan(loss) and samples:
            loss = float((logs or {}).get("loss", loss))
        self.rows.append(
            {
                "epoch": self._epoch,
                "step": self.step,
                "rank": self.communicator.number,
                "loss": loss if samples else math.nan,
                "seconds": seconds,
                # The compute time is the step's time without waiting, transfer and compression. The
                # compute time is 0 if the exchange overlapped all computation.
                "compute_seconds": max(
                    0.0, seconds - traffic.wait_seconds - traffic.transfer_seconds - codec
                ),
                "codec_seconds": codec,
                "communicate_seconds": traffic.transfer_seconds,
                "wait_seconds": traffic.wait_seconds,
                "payload_bytes": traffic.payload_bytes,
                "wire_bytes": traffic.wire_bytes,
                **({} if self.communicator.on_one_host else {"link_bytes": traffic.link_bytes}),
                "messages": traffic.messages,
                "samples": samples,
                **({"ranks": self.communicator.size} if self.communicator.dead else {}),
            }
        )
        board, step = self.communicator.board, self.step - 1
        is_asked = self._report_if_due(now) and self.communicator.rank == 0 and self.stop_asked()
        # A second request to stop would postpone the stop.
        if is_asked and not board.is_stop_requested(step + AHEAD):
            board.request_stop(step + AHEAD)
        if board.is_stop_requested(step):
            self.stopped = self.model.stop_training = True

    def say(self) -> None:
        """After a failed training, report the history rows that are still unreported."""
        self._send(self.communicator.clock.now())

    def put(self, row: Row) -> None:
        """Add the history row of a step that other code, such as a program, has measured."""
        self.rows.append(row)
        self._report_if_due(self.communicator.clock.now())

    def put_epoch(self, metrics: dict[str, float]) -> None:
        """Add the metrics of an epoch that other code (such as a program) has measured."""
        self.epochs.append(metrics)

    def is_stop_requested(self) -> bool:
        """Return whether a user has asked to stop; poll the request every 0.25 seconds."""
        now = self.communicator.clock.now()
        if not self.stopped and now - self._polled_at > SEND_EVERY:
            self._polled_at = now
            self.stopped = self.stop_asked()
        return self.stopped

    def _report_if_due(self, now: float) -> bool:
        """Report new rows if the last report is old enough; return whether rows were reported."""
        if now - self._sent_at <= SEND_EVERY:
            return False
        self._send(now)
        return True

    def _send(self, now: float) -> None:
        self.report("step", self.rows[self._sent :])
        # Only rank 0 reports epochs, because the metrics of an epoch are equal on all ranks.
        if self.communicator.rank == 0:
            self.report("epoch", self.epochs[self._sent_epochs :])
        self._sent, self._sent_epochs, self._sent_at = len(self.rows), len(self.epochs), now


class StopTogether(keras.callbacks.Callback):
    """Stops all ranks if a callback stops training on one rank; this callback must run last.

    All ranks stop after the same training step.

    Args:
        communicator: Communicator of the ranks that stop together.
        steps_done: Number of completed training steps.
    """

    def __init__(self, communicator: Communicator, steps_done: int = 0) -> None:
        super().__init__()
        self._board, self._step = communicator.board, steps_done
        self._alone = communicator.size == 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Announce that this rank asks to stop, and stop if any rank has asked."""
        step, self._step = self._step, self._step + 1
        if self._alone or self._board.is_stop_requested(step):
            return
        if self.model.stop_training and not self._board.has_ended(step):
            self._board.announce_end(step + AHEAD)
        self.model.stop_training = self._board.has_ended(step)


class Position(NamedTuple):
    """A position in a training: completed epochs, and completed steps of the current epoch."""

    epoch: int = 0
    step: int = 0

    def done(self, steps: int | None) -> int:
        """Return the number of completed steps of the training.

        If the number `steps` of steps per epoch is None, only the current epoch counts.
        """
        return self.step if steps is None else self.epoch * steps + self.step


class Progress(keras.callbacks.Callback):
    """Tracks the position in a training, and the Keras metrics of an interrupted epoch.

    The user's callbacks run before the callback `Progress`.

    Args:
        steps: Number of training steps per epoch. If None, an epoch lasts until the end of the
            data.

    Attributes:
        position: Number of completed epochs, and of completed steps in the current epoch, on this
            rank.
        taken: Total number of completed steps over all epochs.
        metrics: States of the Keras metrics at this position, saved by an interrupted training.
        losses: Pairs (loss, rows) of the steps in this epoch. Only strategies with their own
            training step fill the list `losses`.
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
