"""Test that the loss that ranks report includes the losses added by layers of all stages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from labkit import Cluster, DelayedGradients, Experiment, Pipeline
from labkit.model_parallel.stages import OwnLosses
from labkit.network import Network
from labkit.strategies import AllReduce, Strategy, TensorParallel

random = np.random.default_rng(0)
DATA = random.standard_normal((24, 4)), random.standard_normal((24, 2))


def regularised() -> Any:
    import keras

    layers = [
        keras.layers.Dense(5, "tanh", kernel_regularizer="l2"),
        keras.layers.Dense(4, "tanh", activity_regularizer="l2"),
        keras.layers.Dense(2, bias_regularizer="l1", bias_initializer="ones"),
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def plain() -> Any:
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(2)])


def steps(communicator: Any, questions: list[Experiment]) -> list[tuple[list[Any], int]]:
    """Return each experiment's losses per step on this rank, and its number of slowdowns."""
    from labkit.communicator import Communicator
    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    apply_slowdown, slowed = Communicator.apply_slowdown, []

    def counted(self: Any, computed: float) -> None:
        slowed.append(computed)

    Communicator.apply_slowdown = counted  # type: ignore[method-assign]
    found = []
    try:
        for question in questions:
            session = TrainingSession(question, communicator, read(question, communicator))
            losses: list[Any] = []
            loop = session.loop

            def watched(step: Any, *others: Any, to: Any = losses, loop: Any = loop) -> None:
                def noted(*batch: Any) -> Any:
                    to.append(step(*batch))
                    return to[-1]

                loop(noted, *others)

            session.loop = watched  # type: ignore[method-assign]
            slowed.clear()
            question.strategy.train(session)
            found.append((losses, len(slowed)))
            session.close()
    finally:
        Communicator.apply_slowdown = apply_slowdown  # type: ignore[method-assign]
    return found


def experiment(strategy: Strategy, **fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "model": regularised,
        "dataset": DATA,
        "loss": "mean_squared_error",
        "batch_size": 12,
        "workers": 2,
        "precision": "float64",
        "verify": False,
    }
    return Experiment(**base | {"strategy": strategy} | fields)


@pytest.mark.parametrize(
    "strategies",
    [
        [Pipeline(schedule="zero_bubble", microbatches=3), DelayedGradients()],
        pytest.param(
            [Pipeline(), Pipeline(schedule="pipedream", microbatches=1)], marks=pytest.mark.slow
        ),
    ],
    ids=["zero_bubble", "1f1b"],
)
def test_losses_of_layers_in_all_stages_are_in_the_loss(
    cluster: Cluster, strategies: list[Strategy]
) -> None:
    found = cluster.call(steps, [experiment(strategy) for strategy in strategies], ranks=2)
    model_losses = cluster.call(first_loss, experiment(AllReduce(), workers=1), ranks=1)[0]
    assert all(loss is None for losses, _ in found[0] for loss in losses)
    for losses, _ in found[1]:
        assert losses[0] == pytest.approx(model_losses, rel=1e-12)
        assert len(losses) == 2


def first_loss(communicator: Any, question: Experiment) -> float:
    """Return the whole model's loss on the first batch, before any step."""
    import tensorflow as tf

    from labkit.worker.feed import read
    from labkit.worker.session import TrainingSession

    session = TrainingSession(question, communicator, read(question, communicator))
    found: list[float] = []

    def step(x: Any, y: Any, weight: Any) -> float:
        predicted = session.model(x, training=True)
        own = sum(float(loss) for loss in session.model.losses)
        found.append(float(tf.reduce_mean(tf.square(predicted - y))) + own)
        return found[-1]

    session.compile(session.optimizer())
    session.loop(step, lambda: None, None)
    return found[0]


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        (Pipeline(schedule="zero_bubble", microbatches=2), 3 * 2 * 2),
        pytest.param(Pipeline(microbatches=3), 2 * 3 * 2, marks=pytest.mark.slow),
        (TensorParallel(), 2),
    ],
    ids=["zero_bubble", "1f1b", "slices"],
)
def test_a_slow_rank_is_slow_in_each_of_its_passes_and_updates(
    cluster: Cluster, strategy: Strategy, passes: int
) -> None:
    network = Network(latency=0, bandwidth=1e9, stragglers={1: 2.0})
    question = experiment(strategy, network=network, model=plain)
    found = cluster.call(steps, [question], ranks=2, network=network)
    assert [each[0][1] for each in found] == [0, passes + 2]


class Alone:
    """A communicator of one rank that records its calls."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def allgather(self, value: Any, what: str = "") -> list[Any]:
        self.asked.append("allgather")
        return [value]

    def total(self, weight: float, what: str = "") -> float:
        self.asked.append("total")
        return weight


def test_where_no_layer_has_a_loss_ranks_ask_each_other_once() -> None:
    communicator: Any = Alone()
    losses = OwnLosses(communicator)
    for _ in range(3):
        losses.take(None)
        assert losses.added_to(2.0) == 2.0
    assert communicator.asked == ["allgather"]


def test_parts_of_a_step_count_by_their_weights_and_steps_are_apart() -> None:
    communicator: Any = Alone()
    losses = OwnLosses(communicator)
    for expected in (2.0 + 0.25 + 1.5, 2.0 + 0.25 + 1.5):
        losses.take(1.0, 0.25)
        losses.take(1.5)
        assert losses.added_to(2.0) == expected
    losses.take(3.0)
    assert losses.added_to(None) is None
    assert communicator.asked == ["allgather", "total", "total", "total"]
