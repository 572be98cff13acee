"""Training for strategies that take their own steps, with everything else as in `model.fit`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from labkit.communicator import Communicator
from labkit.strategies import Step
from labkit.worker.progress import Position, Progress

if TYPE_CHECKING:
    from labkit.worker.feed import Feed


def train(
    model: keras.Model,
    feed: Feed,
    epochs: int,
    callbacks: list[keras.callbacks.Callback],
    progress: Progress,
    kept: Sequence[keras.callbacks.Callback],
    step: Step,
    validate: Callable[[], dict[str, float]],
    communicator: Communicator,
) -> None:
    """Take steps over what is left of a feed's epochs, calling Keras callbacks around them.

    A callback may end training on one rank, where perhaps only this one knows the loss. The
    others may be some steps ahead by then: all stop together, as many steps later as there are
    ranks.

    Args:
        model: what callbacks look at.
        feed: see `labkit.worker.feed.Feed`.
        epochs: how many.
        callbacks: as for `model.fit`; those with `note` are told loss and rows of each step.
        progress: where training stands; it goes along.
        kept: callbacks behind it.
        step: takes a batch (x, y, sample weight), returns its loss on the rank that knows it.
        validate: metrics after an epoch, with the prefix val_.
        communicator: the ranks, which all learn an epoch's loss.
    """
    told = keras.callbacks.CallbackList([*callbacks, progress, *kept], model=model)
    model.stop_training = False
    told.on_train_begin()
    begin = progress.position
    batches, done = iter(feed.after(begin)), progress.taken
    for epoch in range(begin.epoch, epochs):
        told.on_epoch_begin(epoch)
        for batch in _epoch(feed, batches, progress.position):
            number = progress.position.step
            told.on_train_batch_begin(number)
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
            loss, rows = step(x, y, sample_weight), len(keras.tree.flatten(x)[0])
            if loss is not None:
                progress.losses.append((loss, rows))
            for callback in callbacks:
                if hasattr(callback, "note"):
                    callback.note(loss, rows)
            told.on_train_batch_end(number, {} if loss is None else {"loss": loss})
            model.stop_training = _all_stop(model.stop_training, done, communicator)
            done += 1
            if model.stop_training:
                break
        everyone = [each for part in communicator.allgather(progress.losses) for each in part]
        total = sum(loss * rows for loss, rows in everyone)
        mean = total / max(sum(rows for _, rows in everyone), 1)
        told.on_epoch_end(epoch, {"loss": mean} | validate())
        if model.stop_training:
            break
    told.on_train_end()


def _all_stop(asked: bool, step: int, communicator: Communicator) -> bool:
    """Whether all ranks stop after this step, which each asks itself at the same one."""
    board = communicator.board
    if board.asked_to_stop(step) or board.ends_with(step):
        return True
    if asked:
        board.end_after(step + communicator.size)
    return False


def _epoch(feed: Feed, batches: Iterator[tf.Tensor], begin: Position) -> Iterator[tf.Tensor]:
    """The batches of one epoch: so many of an endless feed, or all that a data set has."""
    if feed.steps is None:
        return iter(feed.after(begin))
    return islice(batches, feed.steps - begin.step)
