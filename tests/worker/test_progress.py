"""Test that interrupted training resumes where it stopped."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

from labkit import AllReduce, Experiment, Layerwise
from labkit.communicator.world import single_rank
from labkit.strategies import Strategy
from labkit.worker.feed import read
from labkit.worker.recorder import Position, Progress, Recorder
from labkit.worker.session import TrainingSession

STEPS, EPOCHS = 4, 3


class Broken(Exception):
    """The test has interrupted training."""


class BreakOff(Progress):
    """Progress that interrupts training once, after a number of steps."""

    def __init__(self, steps: int | None, after: int) -> None:
        super().__init__(steps)
        self.left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.left -= 1
        if self.left == 0:
            raise Broken


def own_batches() -> Any:
    import tensorflow as tf

    x = np.random.default_rng(1).standard_normal((STEPS * 8, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int32)
    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16, seed=3).batch(8)


def endless() -> Any:
    return own_batches().repeat()


def own_model() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss=loss, metrics=["accuracy"])
    return model


def trained(question: Experiment, after: int = 0) -> tuple[list[Any], list[dict[str, float]]]:
    """Return weights and epoch metrics, with one interruption after so many steps, or none."""
    communicator = single_rank()
    session = TrainingSession(question, communicator, read(question, communicator))
    recorder = Recorder(communicator, lambda kind, records: None, lambda: False)
    session.callbacks.insert(0, recorder)
    session.compile(session.optimizer())
    go_on = partial(session.fit, []) if question.strategy == AllReduce() else partial(loop, session)
    if after:
        session.progress = BreakOff(session.feed.steps, after)
        with pytest.raises(Broken):
            go_on()
        session.progress.save_metrics()
    go_on()
    assert session.progress.position == Position(EPOCHS)
    return session.model.get_weights(), recorder.epochs


def loop(session: TrainingSession) -> None:
    """Train with a custom loop over Keras's own steps."""

    def step(x: Any, y: Any, weight: Any) -> float:
        return float(session.model.train_on_batch(x, y, return_dict=True)["loss"])

    session.loop(step, lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [AllReduce(), Layerwise()])
@pytest.mark.parametrize("steps", [STEPS, None])
def test_it_goes_on_as_if_nothing_had_been(strategy: Strategy, steps: int | None) -> None:
    data = own_batches if steps is None else endless
    question = Experiment(
        model=own_model, dataset=data, validation=own_batches, strategy=strategy,
        batch_size=8, steps_per_epoch=steps, epochs=EPOCHS, verify=False,
    )  # fmt: skip
    weights, epochs = trained(question)
    # Without a fixed number of steps per epoch, Keras counts one more update at the end of the
    # data.
    for after in (1, 2 * STEPS - 1, *([] if steps is None else [STEPS, EPOCHS * STEPS])):
        found, told = trained(question, after)
        assert all(np.array_equal(a, b) for a, b in zip(weights, found, strict=True)), after
        assert len(told) == EPOCHS
        for own, other in zip(told, epochs, strict=True):
            assert {**own, "seconds": 0} == {**other, "seconds": 0}
