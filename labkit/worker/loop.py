"""The training loop for strategies with their own training step; it works like `model.fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.strategies import Step
from labkit.worker.recorder import Position, Progress

if TYPE_CHECKING:
    from labkit.worker.feed import Feed


def train(
    model: keras.Model,
    feed: Feed,
    epochs: int,
    callbacks: list[keras.callbacks.Callback],
    progress: Progress,
    last_callbacks: Sequence[keras.callbacks.Callback],
    step: Step,
    validate: Callable[[], dict[str, float]],
    communicator: Communicator,
) -> None:
    """Train on a rank's data for the remaining epochs; call Keras callbacks as `model.fit` does.

    A callback may end training on one rank only, for example if no other rank knows the loss. When
    one rank's callback ends training, other ranks may already be some steps further. All ranks stop
    n steps later, where n is the number of ranks.

    Args:
        model: Model that the callbacks receive.
        feed: Training data of this rank, see `labkit.worker.feed.Feed`.
        epochs: Total number of epochs, including the completed ones.
        callbacks: Callbacks as for `model.fit`. If a callback has a method `note`, this method
            receives the loss and row count of each step.
        progress: Position in the training, which is updated after each step.
        last_callbacks: Callbacks that run after the callback `progress`.
        step: Function (x, y, sample weight) that trains on a batch. The function returns the loss
            on ranks that know the loss, and None on other ranks.
        validate: Function that returns validation metrics after an epoch; their names have the
            prefix val_.
        communicator: Communicator of the ranks over which the loss of an epoch is averaged.
    """
    callback_list = keras.callbacks.CallbackList(
        [*callbacks, progress, *last_callbacks], model=model
    )
    model.stop_training = False
    callback_list.on_train_begin()
    begin = progress.position
    batches, steps_done = iter(feed.after(begin)), progress.taken
    for epoch in range(begin.epoch, epochs):
        callback_list.on_epoch_begin(epoch)
        for batch in _epoch(feed, batches, progress.position):
            number = progress.position.step
            callback_list.on_train_batch_begin(number)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            loss, rows = step(x, y, sample_weight), len(keras.tree.flatten(x)[0])
            if loss is not None:
                progress.losses.append((loss, rows))
            for callback in callbacks:
                if hasattr(callback, "note"):
                    callback.note(loss, rows)
            callback_list.on_train_batch_end(number, {} if loss is None else {"loss": loss})
            model.stop_training = _all_stop(model.stop_training, steps_done, communicator)
            steps_done += 1
            if model.stop_training:
                break
        losses = [entry for part in communicator.allgather(progress.losses) for entry in part]
        total = sum(loss * rows for loss, rows in losses)
        mean = total / max(sum(rows for _, rows in losses), 1)
        callback_list.on_epoch_end(epoch, {"loss": mean} | validate())
        if model.stop_training:
            break
    callback_list.on_train_end()


def _all_stop(is_requested: bool, step: int, communicator: Communicator) -> bool:
    """Return whether all ranks stop after this step; each rank must call this after each step."""
    board = communicator.board
    if board.is_stop_requested(step) or board.has_ended(step):
        return True
    if is_requested:
        board.announce_end(step + communicator.size)
    return False


def _epoch(feed: Feed, batches: Iterator[tf.Tensor], begin: Position) -> Iterator[tf.Tensor]:
    """Return the remaining batches of an epoch, or of the dataset if `feed.steps` is None."""
    if feed.steps is None:
        return iter(feed.after(begin))
    return islice(batches, feed.steps - begin.step)
