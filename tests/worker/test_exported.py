"""A training as data: weights and batches arrive as they were, and what is not alike is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from labkit import Experiment, InvalidInput
from labkit.experiment.batches import plan_of
from labkit.frameworks.exported import Batches
from labkit.worker.exported import export, layers_of, loss_of, optimizer_of
from labkit.worker.feed import read
from labkit.worker.session import build_model

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
LOSS = losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("capacities", [None, (1, 3)])
def test_weights_and_batches_arrive_as_they_were(
    tmp_path: Path, capacities: tuple[float, ...] | None
) -> None:
    fields: dict[str, Any] = {"workers": 2, "batch_size": 500, "epochs": 2, "steps": 4}
    experiment = Experiment(model="cnn", dataset="digits", capacities=capacities, **fields)
    source = read(experiment)
    model = build_model(experiment, source)
    sgd = optimizers.SGD(0.5, momentum=0.25)
    given = [(experiment, source, rank, model, sgd, LOSS, str(tmp_path)) for rank in (0, 1)]
    told = [export(*each) for each in given]
    assert told[0].optimizer == {"learning_rate": 0.5, "momentum": 0.25, "nesterov": False}
    assert [kind for kind, _ in told[1].layers] == [
        *("Conv2D", "Conv2D", "MaxPooling2D", "Flatten", "Dense", "Dense")
    ]
    assert told[0].shape == (8, 8, 1)
    both = [Batches(each) for each in told]
    for here in both:
        for own, theirs in zip(model.get_weights(), here.weights, strict=True):
            np.testing.assert_array_equal(own, theirs)
    x, y = source.train
    plan = plan_of(experiment, len(x), capacities or (1.0, 1.0), source.labels)
    for epoch in range(2):
        for step, rows in enumerate(plan.whole(epoch)):
            each = [here.next() for here in both]
            np.testing.assert_array_equal(np.concatenate([b[0] for b in each]), x[rows])
            np.testing.assert_array_equal(np.concatenate([b[1] for b in each]), y[rows])
            factors = [2 * size / len(rows) for size in plan.sizes(step)]
            assert [b[2] for b in each] == pytest.approx(factors)


def sequential(*hidden: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((6, 6, 2)), *hidden])


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ([layers.Flatten(), layers.Dropout(0.5)], "is a Dropout; Peer trains Dense, Conv2D"),
        ([layers.Conv2D(3, 3, padding="same")], "has padding='same', which is not exported"),
        ([layers.Flatten(), layers.Dense(3, kernel_regularizer="l2")], "kernel_regularizer"),
        ([layers.Flatten(), layers.Dense(3, trainable=False)], "has trainable=False"),
        ([layers.Flatten(), layers.Dense(3, "gelu")], "activation='gelu', which is not the same"),
        ([layers.Dense(3)], "has no flat input; put a Flatten before it"),
    ],
)
def test_layers_that_others_do_not_have_alike_are_refused(
    hidden: list[keras.Layer], words: str
) -> None:
    with pytest.raises(InvalidInput, match=words):
        layers_of(sequential(*hidden))


def test_a_model_that_branches_is_refused() -> None:
    start = keras.Input((3,))
    model = keras.Model(start, layers.Add()([layers.Dense(3)(start), start]))
    with pytest.raises(InvalidInput, match=r"trains a keras.Sequential model, not a Functional"):
        layers_of(model)


def test_losses_and_optimizers_are_those_that_others_have_alike() -> None:
    assert loss_of(losses.MeanSquaredError()) == "MeanSquaredError"
    with pytest.raises(InvalidInput, match=r": SparseCategoricalCrossentropy.from_logits=T"):
        loss_of(losses.Huber())
    with pytest.raises(InvalidInput, match="has from_logits=False, which is not exported"):
        loss_of(losses.SparseCategoricalCrossentropy())
    with pytest.raises(InvalidInput, match="'sum', which is not exported"):
        loss_of(losses.MeanSquaredError(reduction="sum"))
    decays = optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    for other in (optimizers.Adam(), optimizers.SGD(decays)):
        with pytest.raises(InvalidInput, match="SGD at a rate that stays the same"):
            optimizer_of(other)
    with pytest.raises(InvalidInput, match=r"optimizer SGD has clipnorm=1\.0"):
        optimizer_of(optimizers.SGD(clipnorm=1.0))
