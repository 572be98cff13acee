"""Test a training as data: exact weights and batches, and refusals of what is not equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from labkit import Experiment, InvalidInput
from labkit.experiment.batches import plan_of
from labkit.frameworks.exported import Batches, Exported, model_of
from labkit.frameworks.exported import loss_of as loss_in_another_keras
from labkit.worker.exported import export, layers_of, loss_of, optimizer_of
from labkit.worker.feed import read
from labkit.worker.rank_state import build_model

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
LOSS = losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize("capacities", [None, (1, 3)])
def test_weights_and_batches_arrive_as_they_were(
    tmp_path: Path, capacities: tuple[float, ...] | None
) -> None:
    fields: dict[str, Any] = {"workers": 2, "batch_size": 500, "epochs": 2, "steps_per_epoch": 4}
    experiment = Experiment(model="cnn", dataset="digits", batch_weights=capacities, **fields)
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
        for step, rows in enumerate(plan.global_batches(epoch)):
            each = [here.next() for here in both]
            np.testing.assert_array_equal(np.concatenate([b[0] for b in each]), x[rows])
            np.testing.assert_array_equal(np.concatenate([b[1] for b in each]), y[rows])
            factors = [2 * size / len(rows) for size in plan.sizes(step)]
            assert [b[2] for b in each] == pytest.approx(factors)


@pytest.mark.battery(1, 1)
@pytest.mark.parametrize("level", [False, True])
@pytest.mark.parametrize("capacities", [None, (1, 3)])
def test_who_has_numpy_alone_trains_to_the_weights_that_keras_has(
    tmp_path: Path, capacities: tuple[float, ...] | None, level: bool
) -> None:
    """Train two workers from exported files alone, with gradients and their mean in NumPy."""
    fields: dict[str, Any] = {
        "batch_size": 63,
        "epochs": 2,
        "steps_per_epoch": 10,
        "precision": "float64",
    }
    experiment = Experiment(
        model="mlp",
        model_options={"widths": [12, 8]},
        dataset="digits",
        workers=2,
        batch_weights=capacities,
        **fields,
    )
    with float64():
        source = read(experiment)
        model = build_model(experiment, source)
        sgd = optimizers.SGD(0.1, momentum=0.9, nesterov=True)
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)  # in the current float type
        given = [(experiment, source, rank, model, sgd, loss, str(tmp_path)) for rank in (0, 1)]
        start, found = replayed([export(*each) for each in given], level)
        model.compile(sgd, loss)
        x, y = source.train
        plan = plan_of(experiment, len(x), capacities or (1.0, 1.0), source.labels)
        for epoch in range(2):
            for rows in plan.global_batches(epoch):
                model.train_on_batch(x[rows], y[rows])
        for first, own, theirs in zip(start, model.get_weights(), found, strict=True):
            np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-12)
            assert np.abs(first - theirs).max() > 1e-3


@contextmanager
def float64() -> Iterator[None]:
    compute_in("float64")
    try:
        yield
    finally:
        compute_in("float32")


def compute_in(floats: str) -> None:
    keras.config.set_floatx(floats)
    keras.config.set_dtype_policy(floats)


def replayed(told: list[Exported], level: bool) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the weights at the start and after 20 steps of a dense network with momentum."""
    files = [Batches(each) for each in told]
    kinds = [options["activation"] for kind, options in told[0].layers if kind == "Dense"]
    assert kinds == ["relu", "relu", "linear"]
    rate, momentum = (told[0].optimizer[name] for name in ("learning_rate", "momentum"))
    assert told[0].optimizer["nesterov"]
    start = [weight.copy() for weight in files[0].weights]
    weights, memory = files[0].weights, [np.zeros_like(each) for each in start]
    for _ in range(20):
        if level:
            batches = [file.next_padded() for file in files]
            assert len({len(x) for x, _, _ in batches}) == 1
            assert sum(parts.sum() for _, _, parts in batches) == pytest.approx(1)
        else:
            each = [file.next() for file in files]
            batches = [(x, y, np.full(len(x), factor / len(x) / 2)) for x, y, factor in each]
        gradients = [by_hand(weights, x.reshape(len(x), -1), y, parts) for x, y, parts in batches]
        for place, several in enumerate(zip(*gradients, strict=True)):
            step = rate * np.sum(several, axis=0)
            memory[place] = momentum * memory[place] - step
            weights[place] = weights[place] + momentum * memory[place] - step
    return start, weights


def by_hand(
    weights: list[np.ndarray], x: np.ndarray, y: np.ndarray, parts: np.ndarray
) -> list[np.ndarray]:
    """Return the gradients of the rows' cross-entropies, weighted by their parts."""
    inputs = [x]
    for matrix, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        inputs.append(np.maximum(inputs[-1] @ matrix + bias, 0))
    scores = inputs[-1] @ weights[-2] + weights[-1]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    back = shares / shares.sum(1, keepdims=True)
    back[np.arange(len(y)), y] -= 1
    back *= parts[:, np.newaxis]
    found: list[np.ndarray] = []
    for matrix, before in zip(weights[-2::-2], reversed(inputs), strict=True):
        found = [before.T @ back, back.sum(0), *found]
        back = back @ matrix.T * (before > 0)
    return found


def test_another_keras_makes_the_same_model_and_loss_of_it(tmp_path: Path) -> None:
    experiment = Experiment(
        model="cnn", dataset="digits", workers=2, batch_size=100, steps_per_epoch=1
    )
    source = read(experiment)
    model = build_model(experiment, source)
    told = export(experiment, source, 0, model, optimizers.SGD(0.5), LOSS, str(tmp_path))
    batches = Batches(told)
    again, (x, y, _) = model_of(told, batches.weights, keras), batches.next()
    np.testing.assert_array_equal(model(x), again(x))
    each = loss_in_another_keras(told, keras, reduction="none")(y, again(x))
    assert float(LOSS(y, model(x))) == pytest.approx(float(np.mean(each)), rel=1e-6)


def sequential(*hidden: keras.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((6, 6, 2)), *hidden])


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        (
            [layers.Flatten(), layers.Dropout(0.5)],
            "is a Dropout; ExternalFramework trains Dense, Conv2D",
        ),
        ([layers.Conv2D(3, 3, padding="same")], "has padding='same', which is not exported"),
        ([layers.Flatten(), layers.Dense(3, kernel_regularizer="l2")], "kernel_regularizer"),
        ([layers.Flatten(), layers.Dense(3, trainable=False)], "has trainable=False"),
        ([layers.Flatten(), layers.Dense(3, "gelu")], "activation='gelu', which differs in other"),
        ([layers.Dense(3)], "is not flat; add a Flatten"),
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
        with pytest.raises(InvalidInput, match="SGD at a constant rate"):
            optimizer_of(other)
    with pytest.raises(InvalidInput, match=r"optimizer SGD has clipnorm=1\.0"):
        optimizer_of(optimizers.SGD(clipnorm=1.0))
