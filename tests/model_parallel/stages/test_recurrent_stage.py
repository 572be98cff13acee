"""Test that stages over time segments have the gradients of full back-propagation through time."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.common.errors import InvalidInput
from labkit.model_parallel.stages import Batch, BlockChain, RecurrentStage, open_time, split_model
from labkit.model_parallel.stages.recurrent import is_open
from labkit.model_parallel.stages.stage import TimeSegments
from labkit.schedules.pipeline import time_segments

Layers = keras.layers
pytestmark = pytest.mark.usefixtures("in_float64")
random = np.random.default_rng(0)
STEPS = 7


def answers_each_step() -> Any:
    layers = [
        Layers.LSTM(4, return_sequences=True, recurrent_regularizer="l2"),
        Layers.LayerNormalization(),
        Layers.GRU(3, return_sequences=True),
        Layers.TimeDistributed(Layers.Dense(5, "tanh", kernel_regularizer="l2")),
        Layers.SimpleRNN(4, return_sequences=True),
        Layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((STEPS, 2)), *layers])


def answers_at_the_end() -> Any:
    layers = [
        Layers.Reshape((STEPS, 2)),
        Layers.GRU(4, return_sequences=True),
        Layers.LSTM(4, kernel_regularizer="l2"),
        Layers.Dense(5, "tanh", activity_regularizer="l2"),
        Layers.BatchNormalization(),
        Layers.Dense(3),
    ]
    return keras.Sequential([keras.Input((STEPS, 2, 1)), *layers])


def words() -> Any:
    layers = [Layers.Embedding(9, 4), Layers.SimpleRNN(4, return_sequences=True), Layers.Dense(3)]
    return keras.Sequential([keras.Input((STEPS,), dtype="int32"), *layers])


def skips() -> Any:
    x = keras.Input((STEPS, 4))
    y = Layers.Add()([x, Layers.LSTM(4, return_sequences=True)(x)])
    y = Layers.Concatenate()([y, Layers.GRU(2, return_sequences=True)(y)])
    return keras.Model(x, Layers.Softmax()(Layers.Dense(3)(y)))


def batch_of(model: Any, rows: int = 5) -> tuple[Any, Any]:
    shape = rows, *model.input_shape[1:]
    x: Any = random.standard_normal(shape)
    if model.inputs[0].dtype == "int32":
        x = random.integers(0, 9, shape).astype(np.int32)
    return tf.constant(x), tf.constant(random.standard_normal((rows, *model.output_shape[1:])))


def squared(y: Any, predicted: Any, weight: Any) -> Any:
    return keras.losses.MeanSquaredError()(y, predicted, weight)


def whole(model: Any, x: Any, y: Any, weight: Any = None) -> tuple[float, list[Any]]:
    with tf.GradientTape() as tape:
        loss = squared(y, model(x, training=True), weight) + sum(model.losses)
    values = [variable.value for variable in model.trainable_variables]
    return float(loss), list(tape.gradient(loss, values))


def stages_of(model: Any, edges: Any, count: int, recompute: bool = False) -> list[RecurrentStage]:
    parts = split_model(open_time(model), edges)
    last = len(parts) - 1
    return [
        RecurrentStage(part, squared if n == last else None, n == 0, recompute, count)
        for n, part in enumerate(parts)
    ]


def sweep(
    stages: list[RecurrentStage], count: int, x: Any, y: Any, weight: Any = None
) -> tuple[float, list[Any]]:
    """Run all time segments forward, then backward; return the loss and all gradients."""
    opened = [is_open(s.model.inputs[0]) for s in stages] + [is_open(stages[-1].model.outputs[0])]
    parts = TimeSegments(Batch(x, y, weight), count, opened)
    loss = 0.0
    for number in range(count):
        value = parts.input(number)
        for place, stage in enumerate(stages):
            if parts.reaches(number, place):
                assert value.shape[: len(parts.size(number, place))] == parts.size(number, place)
                value = stage.forward(number, value, parts.share(number), parts.targets(number))
        if value is not None and value.shape == ():
            loss += float(value)
    for number in reversed(range(count)):
        gradient = None
        for place, stage in reversed(list(enumerate(stages))):
            if parts.reaches(number, place):
                gradient = stage.backward(number, gradient)
        assert gradient is None  # the input needs no gradient
    return loss, [gradient for stage in stages for gradient in stage.take_gradients()]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, tf.convert_to_tensor(b), rtol=1e-10, atol=1e-13)


QUICK = [
    (answers_each_step, False, 3),
    (answers_at_the_end, True, 3),
    (words, False, STEPS),
    (skips, False, 1),
]
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in product(
        [answers_each_step, answers_at_the_end, words, skips], [False, True], [1, 3, STEPS]
    )
    if case in QUICK or case[1:] not in [(False, 1), (True, STEPS)]
]


@pytest.mark.battery(1, 2)
@pytest.mark.parametrize(("build", "recompute", "count"), CASES)
def test_gradients_are_those_of_the_whole_sequence(build: Any, recompute: bool, count: int) -> None:
    model = build()
    x, y = batch_of(model)
    _, expected = whole(model, x, y)
    blocks = len(BlockChain(model))
    stages = stages_of(model, range(blocks + 1), count, recompute)
    for _ in range(2):  # nothing remains from the batch before
        loss, found = sweep(stages, count, x, y)
        assert_same(found, expected)
    own = sum(float(each) for each in stages[-1].model.losses)
    assert loss == pytest.approx(float(squared(y, model(x, training=True), None)) + own)
    inside = [is_open(stage.model.inputs[0]) for stage in stages]
    assert [stage.max_in_flight for stage in stages] == [count if each else 1 for each in inside]


@pytest.mark.slow
@settings(max_examples=8)
@given(
    steps=st.integers(1, 9),
    data=st.data(),
    cut=st.integers(1, 2),
    cell=st.sampled_from([Layers.LSTM, Layers.GRU, Layers.SimpleRNN]),
    last_only=st.booleans(),
    rows=st.integers(1, 4),
)
def test_any_stretches_of_any_sequence(
    steps: int, data: st.DataObject, cut: int, cell: Any, last_only: bool, rows: int
) -> None:
    count = data.draw(st.integers(1, steps))
    layers = [cell(2, return_sequences=True), cell(3, return_sequences=not last_only)]
    model = keras.Sequential([keras.Input((steps, 2)), *layers, Layers.Dense(1)])
    x, y = batch_of(model, rows)
    weight = tf.constant(random.uniform(size=rows if last_only else (rows, 1)))
    expected_loss, expected = whole(model, x, y, weight)
    loss, found = sweep(stages_of(model, [0, cut, 3], count), count, x, y, weight)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert_same(found, expected)


@pytest.mark.slow
def test_sample_weights_of_each_step_go_with_their_steps() -> None:
    model = answers_each_step()
    x, y = batch_of(model)
    weight = tf.constant(random.uniform(size=(5, STEPS)))
    _, expected = whole(model, x, y, weight)
    _, found = sweep(stages_of(model, [0, 2, 6], 3), 3, x, y, weight)
    assert_same(found, expected)
    assert np.abs(found[0] - whole(model, x, y)[1][0]).max() > 1e-6


def test_an_opened_model_shares_its_layers_and_leaves_them_as_they_were() -> None:
    model = skips()
    x, _ = batch_of(model)
    before = np.asarray(model(x))
    opened = open_time(model)
    assert opened.input_shape == (None, None, 4)
    assert opened.output_shape == (None, None, 3)
    assert BlockChain(opened).names() == BlockChain(model).names()
    held = {id(variable) for variable in opened.trainable_variables}
    assert held == {id(variable) for variable in model.trainable_variables}
    for length in (STEPS, 3):  # the state starts anew with each call
        np.testing.assert_allclose(opened(x[:, :length]), before[:, :length], rtol=1e-12)
    np.testing.assert_array_equal(model(x), before)


def model_of(*layers: Any, shape: tuple[int, ...] = (STEPS, 2)) -> Any:
    return keras.Sequential([keras.Input(shape), *layers])


LSTM = Layers.LSTM


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: model_of(Layers.Dense(3)), "has no recurrent layer .LSTM, GRU, SimpleRNN.; use"),
        (lambda: model_of(Layers.Bidirectional(LSTM(2))), "Bidirectional.*several steps.*allowed"),
        (lambda: model_of(LSTM(2, go_backwards=True)), "use go_backwards=False"),
        (lambda: model_of(LSTM(2, unroll=True)), "use unroll=False"),
        (lambda: model_of(LSTM(2, dropout=0.1)), "one mask for all steps; use dropout=0"),
        (lambda: model_of(LSTM(2, recurrent_dropout=0.1)), "use recurrent_dropout=0"),
        (lambda: model_of(LSTM(2, activity_regularizer="l2")), "activity_regularizer counts all"),
        (lambda: model_of(Layers.Conv1D(2, 3), LSTM(2)), "Conv1D.*combine several steps"),
        (
            lambda: model_of(LSTM(2, return_sequences=True), Layers.GlobalAveragePooling1D()),
            "GlobalAveragePooling1D.*several steps",
        ),
        (lambda: model_of(Layers.Reshape((2, STEPS)), LSTM(2)), "changes the time axis"),
        (lambda: model_of(Layers.LayerNormalization(axis=1), LSTM(2)), r"axis=\[1\] is not a f"),
        (lambda: model_of(Layers.Dense(4), shape=(STEPS,)), "has no feature axis"),
        (
            lambda: model_of(Layers.TimeDistributed(Layers.BatchNormalization()), LSTM(2)),
            "BatchNormalization computes statistics over all steps",
        ),
    ],
)
def test_what_looks_at_other_steps_is_refused_with_what_is_allowed(
    build: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        open_time(build())


def test_a_layer_used_twice_and_a_state_of_the_models_own_are_refused() -> None:
    x = keras.Input((STEPS, 2))
    twice = LSTM(2, return_sequences=True)
    with pytest.raises(InvalidInput, match="it is used twice"):
        open_time(keras.Model(x, twice(twice(x))))
    first = Layers.Dense(2)(LSTM(2)(x))
    with pytest.raises(InvalidInput, match="combines a sequence with the output of the last step"):
        open_time(keras.Model(x, Layers.Add()([LSTM(2, return_sequences=True)(x), first])))
    begin = Layers.TimeDistributed(Layers.Dense(2))(x)
    with pytest.raises(InvalidInput, match="its initial state comes from the model"):
        open_time(keras.Model(x, Layers.SimpleRNN(2)(x, initial_state=begin)))


@given(steps=st.integers(1, 40), count=st.integers(1, 40))
def test_stretches_cover_the_steps_and_are_of_equal_length_up_to_one(
    steps: int, count: int
) -> None:
    if count > steps:
        with pytest.raises(
            InvalidInput, match=f"exceeds the {steps} time steps.* allowed: 1 to {steps}"
        ):
            time_segments(steps, count)
        return
    edges = time_segments(steps, count)
    lengths = [b - a for a, b in pairwise(edges)]
    assert (edges[0], edges[-1], len(lengths)) == (0, steps, count)
    assert 1 <= min(lengths) <= max(lengths) <= min(lengths) + 1


def test_targets_and_weights_without_steps_for_a_model_that_answers_each_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"each of 7 steps.* shape \[None\]; give one target"):
        TimeSegments(Batch(np.zeros((5, STEPS, 2)), np.zeros(5)), 2, [True, True])
    x = y = np.zeros((5, STEPS, 2))
    with pytest.raises(InvalidInput, match=r"weight time steps, not rows.* give shape \[None, 1\]"):
        TimeSegments(Batch(x, y, np.zeros(5)), 2, [True, True])
