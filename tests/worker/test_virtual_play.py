"""Test real models on the virtual clock: a run resumed midway equals the whole run."""

from __future__ import annotations

from itertools import count
from typing import Any

import keras
import numpy as np
import pytest

from labkit import (
    AllReduce,
    Downpour,
    ElasticAveraging,
    ErrorFeedback,
    Experiment,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    StaleSynchronous,
    TopK,
)
from labkit.common.errors import InvalidInput
from labkit.communicator.world import single_rank
from labkit.programs.program_state import ProgramState
from labkit.worker.compute_backend import ComputeBackend
from labkit.worker.feed import read
from labkit.worker.program_runner import SimulatedTraining
from labkit.worker.recorder import Recorder
from labkit.worker.session import TrainingSession


def restless() -> keras.Model:
    """Return a model with dropout, moving statistics, optimizer slots and a rate schedule."""
    layers: list[Any] = [
        keras.Input((5,)),
        keras.layers.Dense(6),
        keras.layers.Dropout(0.3, seed=1),
    ]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
    return model


X = np.random.default_rng(1).standard_normal((48, 5)).astype(np.float32)
ARRAYS = X, (X[:, 0] > 0).astype(np.int32)


def own_batches() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(ARRAYS).batch(12)


def staged(question: Experiment) -> tuple[TrainingSession, ComputeBackend, SimulatedTraining]:
    communicator = single_rank()
    session = TrainingSession(question, communicator, read(question, communicator))
    session.recorder = Recorder(communicator, lambda kind, records: None, lambda: False)
    session.compile(session.optimizer())
    stage = ComputeBackend(session, question.strategy)  # type: ignore[arg-type]
    stage.hold(range(len(stage.roles.hosts)))
    return session, stage, SimulatedTraining(session, question.strategy, stage)  # type: ignore[arg-type]


def told(session: TrainingSession, stage: ComputeBackend) -> list[Any]:
    stage.leave()
    assert session.recorder is not None
    return [stage.rows, session.recorder.epochs, session.exchanged, session.model.get_weights()]


@pytest.mark.battery(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "data"),
    [
        (AllReduce(compressor="DGC"), ARRAYS),
        (ParameterServer(2, synchronous=False, compressor=ErrorFeedback(TopK(0.2))), ARRAYS),
        (StaleSynchronous(1), own_batches),
        (Downpour(2, push_every=3), ARRAYS),
        (ElasticAveraging(period=2), ARRAYS),
        (Gossip("ring", asynchronous=True), ARRAYS),
        (ParameterAveraging(3, outer_optimizer="nesterov", optimizer_state="average"), ARRAYS),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_taken_up_ends_as_the_whole_run_bit_for_bit(strategy: Any, data: Any) -> None:
    own = {} if data is ARRAYS else {"steps_per_epoch": 4}
    question = Experiment(
        model=restless, dataset=data, validation=ARRAYS, strategy=strategy, workers=3, epochs=2,
        batch_size=12, virtual={"compute_time": {"seconds": 0.1, "distribution": "lognormal"}},
        network="1GbE", verify=False, **own,
    )  # fmt: skip
    session, stage, play = staged(question)
    play.play()
    whole = told(session, stage)

    kept: list[ProgramState] = []
    session, stage, play = staged(question)
    moments = count()

    def look(one: SimulatedTraining) -> None:
        if next(moments) in (4, 30):
            kept.append(one.save_state())

    play.play(look)
    assert repr(told(session, stage)) == repr(whole)
    for state in kept:
        session, stage, play = staged(question)
        play.load_state(state)
        play.play()
        assert repr(told(session, stage)) == repr(whole)
        for one, other in zip(told(session, stage)[3], whole[3], strict=True):
            assert one.tobytes() == other.tobytes()


def test_replicas_that_are_cut_cannot_be_kept() -> None:
    question = Experiment(
        model="mlp", model_options={"widths": [4]}, dataset=ARRAYS, workers=2, batch_size=12,
        strategy=ParameterServer(stages=2), clock="virtual", verify=False,
    )  # fmt: skip
    *_, play = staged(question)
    with pytest.raises(InvalidInput, match="activations are in flight"):
        play.play(lambda one: None)
