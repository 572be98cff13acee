"""Test functions cut out of one graph: each operation runs once, in the order of the trace."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from labkit.model_parallel.stages import Stage
from labkit.model_parallel.stages.compiled import Compiled

Layers = keras.layers


def compiled(model: Any, first: bool = False) -> Compiled:
    """Return a compiled pass whose only result is the model's output."""

    def compute(x: Any) -> tuple[list[Any], list[Any], Any]:
        y = model(x, training=True)
        return [y], [y], tf.zeros(())

    spec = tf.TensorSpec([None, *model.input_shape[1:]], model.inputs[0].dtype)
    return Compiled(compute, [spec], nobody if first else everybody, model.trainable_variables)


def nobody(*arguments: Any) -> list[Any]:
    return []


def everybody(*arguments: Any) -> list[Any]:
    return list(arguments)


def products(cut: Any) -> Counter[str]:
    kinds = ("MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    return Counter(node.op for node in cut.part.node if node.op in kinds)


def stack(depth: int = 3) -> Any:
    layers = [Layers.Dense(5, "relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((4,)), *layers])


def small_cnn() -> Any:
    layers = [Layers.Conv2D(3, 3, activation="relu"), Layers.MaxPooling2D(), Layers.Conv2D(2, 2)]
    return keras.Sequential([keras.Input((8, 8, 2)), *layers, Layers.Flatten(), Layers.Dense(3)])


def test_what_is_traced_is_the_function_itself_and_no_translation_of_it() -> None:
    files = []

    def compute(x: Any) -> tuple[list[Any], list[Any], Any]:
        files.append(sys._getframe().f_code.co_filename)
        return [x], [x], tf.zeros(())

    Compiled(compute, [tf.TensorSpec([None, 2])], everybody, [])
    assert files == [__file__]


@pytest.mark.parametrize(("first", "into"), [(False, 3), (True, 2)])
def test_each_part_has_the_products_of_its_own(first: bool, into: int) -> None:
    found = compiled(stack(), first)
    assert products(found.ahead) == {"MatMul": 3}
    assert products(found.full_backward) == {"MatMul": into + 3}
    assert [products(part) for part in found.parts] == [{"MatMul": into}, {"MatMul": 3}]


def test_convolutions_have_an_input_part_and_a_weight_part_each() -> None:
    first, second = compiled(small_cnn()).parts
    assert products(first) == {"Conv2DBackpropInput": 2, "MatMul": 1}
    assert products(second) == {"Conv2DBackpropFilter": 2, "MatMul": 1}


def embedded() -> Any:
    layers = [Layers.Embedding(9, 4), Layers.LayerNormalization(), Layers.Flatten()]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *layers, Layers.Dense(3)])


def looping() -> Any:
    layers = [Layers.LSTM(3, return_sequences=True), Layers.SimpleRNN(2), Layers.Dense(3)]
    return keras.Sequential([keras.Input((5, 2)), *layers])


@pytest.mark.parametrize(
    ("build", "first"),
    [
        (small_cnn, False),
        (embedded, True),
        pytest.param(looping, False, marks=pytest.mark.slow),
    ],
)
def test_both_parts_and_the_whole_are_what_the_tape_says(build: Any, first: bool) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    x = tf.cast(
        9 * np.random.default_rng(0).random((4, *model.input_shape[1:])), model.inputs[0].dtype
    )
    with tf.GradientTape() as tape:
        if not first:
            tape.watch(x)
        y = model(x, training=True)
    seed = tf.constant(np.random.default_rng(1).standard_normal(y.shape), y.dtype)
    weights = [variable.value for variable in model.trainable_variables]
    expected = tape.gradient(y, [*([] if first else [x]), *weights], seed)
    found = compiled(model, first)
    (result,), kept = found.forward([x])
    np.testing.assert_allclose(result, y, rtol=1e-5)
    dx, dw = found.backward(kept, [seed])
    again, left = found.backward_input(kept, [seed])
    for gradients in ([*dx, *dw], [*again, *found.backward_weight(left)]):
        for a, b in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(a, tf.convert_to_tensor(b), rtol=1e-4, atol=1e-6)


class Called(keras.layers.Layer):
    """A layer that records each forward and backward pass through it."""

    def __init__(self, call_back: Any, **options: Any) -> None:
        super().__init__(**options)
        self.call_back = call_back

    def call(self, x: Any) -> Any:
        def note(way: str, value: Any) -> Any:
            def write(array: Any) -> Any:
                self.call_back(f"{way} {self.name}")
                return array

            found = tf.numpy_function(write, [value], value.dtype)
            found.set_shape(value.shape)
            return found

        @tf.custom_gradient
        def passed(x: Any) -> Any:
            return note("forward", x), lambda gradient: note("backward", gradient)

        return passed(x)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_python_does_in_a_model_is_done_once_and_in_order(
    later: bool, recompute: bool
) -> None:
    calls: list[str] = []
    x = keras.Input((4,))
    side = Called(calls.append, name="b")(Layers.Dense(4)(x))  # side by side, not in sequence
    other = Called(calls.append, name="a")(Layers.Dense(4)(x))
    model = keras.Model(x, Called(calls.append, name="end")(Layers.Add()([side, other])))
    stage = Stage(model, first=True, recompute=recompute)
    y = stage.forward(0, tf.ones((2, 4)), 1.0)
    forth = list(calls)
    assert sorted(forth) == ["forward a", "forward b", "forward end"]
    stage.backward(0, tf.ones_like(y), later)
    if later:
        stage.backward_weight(0)
    back = calls[3:] if not recompute else calls[6:]
    assert recompute is (calls[3:6] == forth)
    assert back[0] == "backward end"
    assert sorted(back) == ["backward a", "backward b", "backward end"]
    first_time = calls.copy()
    calls.clear()
    stage.backward(1, stage.forward(1, tf.ones((3, 4)), 1.0), later)
    if later:
        stage.backward_weight(1)
    assert calls == first_time


@pytest.mark.parametrize("later", [False, True])
def test_statistics_change_once_a_forward_pass(later: bool) -> None:
    layers = [Layers.Dense(3), Layers.BatchNormalization(), Layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    twin = keras.models.clone_model(model)
    for ours, theirs in zip(twin.variables, model.variables, strict=True):
        ours.assign(theirs)
    stage, x = Stage(model), tf.random.normal((6, 4))
    for number in range(2):
        stage.backward(number, stage.forward(number, x, 0.5), later)
        if later:
            stage.backward_weight(number)
        twin(x, training=True)
    for a, b in zip(model.non_trainable_variables, twin.non_trainable_variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)


def test_any_number_of_rows_is_traced_once() -> None:
    traced = []

    def noted(x: Any) -> Any:
        traced.append(x.shape)
        return 2 * x

    model = keras.Sequential([keras.Input((4,)), Layers.Dense(3), Layers.Lambda(noted)])
    traced.clear()
    stage = Stage(model)
    for number, rows in enumerate([5, 5, 4, 1, 6]):
        y = stage.forward(number, tf.ones((rows, 4)), 1.0)
        assert stage.backward(number, tf.ones_like(y)).shape == (rows, 4)
    assert len(traced) == 1


def test_half_precision_keeps_its_dtypes() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = stack(2)
    finally:
        keras.config.set_dtype_policy("float32")
    stage = Stage(model)
    y = stage.forward(0, tf.ones((2, 4)), 1.0)
    assert y.dtype == tf.bfloat16
    dx = stage.backward(0, tf.ones_like(y), True)
    stage.backward_weight(0)
    assert dx.dtype == tf.float32
    assert {gradient.dtype for gradient in stage.take_gradients()} == {tf.float32}
