"""What a rank writes down while it trains: one row a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.exchange import Timeline
from labkit.exchange.hooks import Batch, Hook, Logs, Rows, seam

Row = dict[str, float]
SEND_EVERY = 0.25  # seconds between two messages to whoever watches


class Recorder(keras.callbacks.Callback, Hook):
    """Times every step, reads the traffic meter, and stops training on all ranks at one step.

    A step's seconds run from its begin to its end, with the computation, the wait for other ranks
    and the exchange; validation and the user's callbacks stand outside. The loss of the step is
    that of this rank's rows, caught where the model computes it; Keras logs running means.

    Args:
        communicator: whose traffic counts.
        report: receives what is new, "step" with rows and "epoch" with metrics, at most every
            quarter of a second.
        stop_asked: whether someone wants training to end; asked on rank 0.

    Attributes:
        rows, epochs: what has been written down.
        begin: steps that were taken before the first row.
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
        self.timeline: Timeline | None = None  # of the strategy or the exchange
        self._compressed: Any = None  # its reduction through a compressor
        self._codec = 0.0
        self._loss = tf.Variable(float("nan"), dtype=tf.float64, trainable=False)
        self._samples = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._sent, self._sent_epochs, self._sent_at, self._epoch = 0, 0, 0.0, 0
        self._asked_at = 0.0

    def set_model(self, model: Any) -> None:
        """Catch loss and rows inside the training step."""
        super().set_model(model)
        exchange = getattr(model.optimizer, "exchange", None)
        if exchange is not None:
            self.timeline = exchange.timeline
        self._compressed = exchange.compressed if exchange is not None else None
        seam(model).put_on(self)

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self.begin + len(self.rows)

    def train_step(self, inner: Callable[[Batch], Logs], rows: Rows, data: Batch) -> Logs:
        """Note the rows of the batch as it came."""
        self._samples.assign(tf.cast(rows, tf.int64))
        return inner(data)

    def compute_loss(
        self, inner: Callable[..., tf.Tensor], rows: Rows, *given: tf.Tensor, **named: tf.Tensor
    ) -> tf.Tensor:
        """Note the loss of a training step."""
        value = inner(*given, **named)
        if named.get("training", True):
            self._loss.assign(tf.cast(value, tf.float64))
        return value

    @property
    def loss(self) -> float:
        """Of the step under way, as far as it is known."""
        return float(self._loss.numpy())

    def note(self, loss: float | None, samples: int) -> None:
        """Loss and rows of a step that is not the model's own; None on ranks that do not know."""
        self._loss.assign(math.nan if loss is None else loss)
        self._samples.assign(0 if loss is None else samples)

    def on_train_end(self, logs: Any = None) -> None:
        """Send what is left and leave the model as it was."""
        self._send(self.communicator.clock.now())
        seam(self.model).take_off(self.name)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch for its rows."""
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Keep the epoch's metrics beside the training time so far."""
        seconds = sum(row["seconds"] for row in self.rows)
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        self.epochs.append({"epoch": epoch, "step": self.step, "seconds": seconds} | metrics)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock."""
        self._before = self.communicator.traffic.copy()
        if self.timeline is not None:
            self.timeline.step = self.step
        self._start = self.communicator.clock.now()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Write the row; agree with the other ranks on whether to stop."""
        loss = float(self._loss.numpy())  # waits until the step is done
        now = self.communicator.clock.now()
        if self.timeline is not None:
            self.timeline.add("step", -1, self._start)
        traffic = self.communicator.traffic.since(self._before)
        seconds = now - self._start - traffic.aside_seconds
        samples = int(self._samples.numpy())
        coded = self._compressed.seconds if self._compressed is not None else 0.0
        codec, self._codec = coded - self._codec, coded
        if math.isnan(loss) and samples:  # a train_step of the user's own computes it elsewhere
            loss = float((logs or {}).get("loss", loss))
        self.rows.append(
            {
                "epoch": self._epoch,
                "step": self.step,
                "rank": self.communicator.number,
                "loss": loss if samples else math.nan,
                "seconds": seconds,
                # What is left; nothing, where all of it was hidden behind an exchange.
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
        if self._tells(now) and self.communicator.rank == 0 and self.stop_asked():
            # One step ahead: no rank can pass that step before this one has joined it.
            self.communicator.board.stop_after(self.step)
        if self.communicator.board.asked_to_stop(self.step - 1):
            self.stopped = self.model.stop_training = True

    def say(self) -> None:
        """Send what is left of a training that goes no further."""
        self._send(self.communicator.clock.now())

    def put(self, row: Row) -> None:
        """Take a step that somebody else has measured."""
        self.rows.append(row)
        self._tells(self.communicator.clock.now())

    def put_epoch(self, metrics: dict[str, float]) -> None:
        """Likewise, an epoch."""
        self.epochs.append(metrics)

    def wanted(self) -> bool:
        """Whether somebody wants training to end, asked now and then, on rank 0."""
        now = self.communicator.clock.now()
        if not self.stopped and now - self._asked_at > SEND_EVERY:
            self._asked_at = now
            self.stopped = self.stop_asked()
        return self.stopped

    def _tells(self, now: float) -> bool:
        """Send what is new, if it is time; whether it was."""
        if now - self._sent_at <= SEND_EVERY:
            return False
        self._send(now)
        return True

    def _send(self, now: float) -> None:
        self.report("step", self.rows[self._sent :])
        if self.communicator.rank == 0:  # the metrics of an epoch are those of all ranks
            self.report("epoch", self.epochs[self._sent_epochs :])
        self._sent, self._sent_epochs, self._sent_at = len(self.rows), len(self.epochs), now


class StopTogether(keras.callbacks.Callback):
    """Comes last: where a callback of one rank ends training within an epoch, all ranks end it.

    They do so after the same step, two later: a rank that exchanges by priority may have one step
    behind it that the others have not seen.

    Args:
        communicator: the ranks.
        done: steps before the first one.
    """

    def __init__(self, communicator: Communicator, done: int = 0) -> None:
        super().__init__()
        self._board, self._step = communicator.board, done
        self._alone = communicator.size == 1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Pass on a rank's wish to stop; follow that of any."""
        step, self._step = self._step, self._step + 1
        if self._alone or self._board.asked_to_stop(step):
            return
        if self.model.stop_training and not self._board.ends_with(step):
            self._board.end_after(step + 2)
        self.model.stop_training = self._board.ends_with(step)
