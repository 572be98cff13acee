"""Test that a stage's gradients equal the tape's on the whole model, in all circumstances."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.model_parallel.stages import BlockChain, Stage, split_model

Layers = keras.layers
pytestmark = pytest.mark.usefixtures("in_float64")


def regularised() -> Any:
    layers = [
        Layers.Dense(6, "tanh", kernel_regularizer="l2"),
        Layers.Dense(5, "relu", activity_regularizer="l2"),
        Layers.Dense(3, bias_regularizer="l1"),
    ]
    return keras.Sequential([keras.Input((4,)), *layers])


def convolutional() -> Any:
    layers = [Layers.Reshape((4, 4, 1)), Layers.Conv2D(3, 3, activation="relu")]
    return keras.Sequential([keras.Input((16,)), *layers, Layers.Flatten(), Layers.Dense(3)])


def recurrent() -> Any:
    return keras.Sequential([keras.Input((3, 2)), Layers.LSTM(3), Layers.Dense(3)])


def batch_of(model: Any, rows: int = 7) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, *model.input_shape[1:]))
    return tf.constant(x), tf.constant(random.standard_normal((rows, 3)))


def squared(y: Any, predicted: Any, weight: Any) -> Any:
    assert weight is None
    return tf.reduce_mean(tf.square(y - predicted))


def whole(model: Any, x: Any, y: Any) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = squared(y, model(x, training=True), None) + sum(model.losses)
    return list(tape.gradient(loss, [variable.value for variable in model.trainable_variables]))


def stages_of(model: Any, recompute: bool = False) -> list[Stage]:
    parts = split_model(model, range(len(BlockChain(model)) + 1))
    last = len(parts) - 1
    return [
        Stage(part, squared if n == last else None, n == 0, recompute)
        for n, part in enumerate(parts)
    ]


def forward(stages: list[Stage], x: Any, y: Any, edges: list[int]) -> float:
    """Run all micro-batches forward one after the other, and return the loss."""
    loss = 0.0
    for number, (a, b) in enumerate(pairwise(edges)):
        value = x[a:b]
        for stage in stages:
            value = stage.forward(number, value, (b - a) / len(x), (y[a:b], None))
        loss += float(value)
    return loss


def backward(stages: list[Stage], count: int, later: bool = False) -> list[Any]:
    """Run all micro-batches backward, and return the gradients."""
    for number in range(count):
        gradient = None
        for stage in reversed(stages):
            gradient = stage.backward(number, gradient, later)
        assert gradient is None  # the input needs no gradient
    return [gradient for stage in stages for gradient in stage.take_gradients()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("build", "recompute"),
    [
        (regularised, False),
        (regularised, True),
        (convolutional, True),
        pytest.param(recurrent, False, marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_the_whole(build: Any, recompute: bool) -> None:
    model = build()
    x, y = batch_of(model)
    expected = whole(model, x, y)
    edges = [0, 1, 5, 7]  # unequal micro-batches, in which each row counts the same
    stages = stages_of(model, recompute)
    loss = forward(stages, x, y, edges)
    assert_same(backward(stages, 3), expected)
    if not model.losses:  # each stage adds its own layers' losses
        assert loss == pytest.approx(float(squared(y, model(x), None)))
    assert [stage.max_in_flight for stage in stages] == [3] * len(stages)


def test_input_and_weight_parts_together_are_the_backward() -> None:
    model = regularised()
    x, y = batch_of(model)
    stages = stages_of(model)
    forward(stages, x, y, [0, 3, 7])
    nothing = backward(stages, 2, later=True)
    assert not any(np.any(gradient) for gradient in nothing)
    for stage in stages:
        for number in (1, 0):
            stage.backward_weight(number)
    found = [gradient for stage in stages for gradient in stage.take_gradients()]
    assert_same(found, whole(model, x, y))


@pytest.mark.parametrize(
    ("build", "optimizer"),
    [
        (regularised, None),
        (regularised, "adam"),
        (convolutional, "sgd"),
        pytest.param(recurrent, "sgd", marks=pytest.mark.slow),
    ],
)
def test_weights_may_change_between_forward_and_backward(build: Any, optimizer: str | None) -> None:
    """Change the weights by assignment, or in place as optimizers do."""
    model = build()
    x, y = batch_of(model)
    expected = whole(model, x, y)
    stages = stages_of(model)
    forward(stages, x, y, [0, 4, 7])
    for stage in stages:
        if optimizer is None:
            for variable in stage.variables:
                variable.assign(variable.value * -2 + 1)
        else:
            ones = [tf.ones_like(variable.value) for variable in stage.variables]
            if ones:
                keras.optimizers.get(optimizer).apply(ones, stage.variables)
    assert np.abs(whole(model, x, y)[0] - expected[0]).max() > 1e-6
    assert_same(backward(stages, 2), expected)


def test_gradients_are_taken_once_and_zero_without_a_micro_batch() -> None:
    model = regularised()
    x, y = batch_of(model)
    stages = stages_of(model)
    forward(stages, x, y, [0, 7])
    backward(stages, 1)
    assert not any(np.any(gradient) for stage in stages for gradient in stage.take_gradients())


def test_recomputation_drops_the_same_and_counts_a_batch_once() -> None:
    layers = [Layers.Dense(8), Layers.BatchNormalization(), Layers.Dropout(0.5), Layers.Dense(3)]
    models = []
    for recompute in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [keras.Input((4,)), *[type(k).from_config(k.get_config()) for k in layers]]
        )
        x, y = batch_of(model)
        stages = stages_of(model, recompute)
        forward(stages, x, y, [0, 4, 7])
        models.append((backward(stages, 2), model.get_weights()))
    (kept, state), (again, state_again) = models
    assert_same(again, kept)
    assert_same(state_again, state)


def test_sparse_gradients_of_an_embedding_are_made_dense() -> None:
    layers = [Layers.Embedding(9, 4), Layers.GlobalAveragePooling1D(), Layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    x = tf.constant(np.random.default_rng(0).integers(0, 9, (7, 6)), tf.int32)
    y = tf.zeros((7, 3), tf.float64)
    stages = stages_of(model)
    forward(stages, x, y, [0, 4, 7])
    assert_same(backward(stages, 2), [tf.convert_to_tensor(g) for g in whole(model, x, y)])


def test_an_output_that_does_not_depend_on_the_input_sends_zeros_back() -> None:
    layers = [Layers.Dense(4), Layers.Lambda(tf.stop_gradient), Layers.Dense(3)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    x, y = batch_of(model)
    stages = stages_of(model)
    forward(stages, x, y, [0, 7])
    gradients = backward(stages, 1)
    assert not np.any(gradients[0])
    assert np.any(gradients[-1])
