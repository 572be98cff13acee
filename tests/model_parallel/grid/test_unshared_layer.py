"""Test layers with unshared kernels, and models of them as a grid of ranks sees them."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit import datasets, models
from labkit.common.errors import InvalidInput
from labkit.schedules.grid_layers import GridLayer

random = np.random.default_rng(0)


def test_each_place_has_a_kernel_of_its_own() -> None:
    from labkit.models.unshared import LocallyConnected2D

    layer = LocallyConnected2D(3, (2, 3), strides=(2, 1), activation="relu", dtype="float64")
    x = random.standard_normal((4, 7, 5, 2))
    y = np.asarray(layer(x))
    assert y.shape == layer.compute_output_shape(x.shape) == (4, 3, 3, 3)
    layer.bias.assign(random.standard_normal(layer.bias.shape))
    kernel, bias, y = layer.kernel.numpy(), layer.bias.numpy(), np.asarray(layer(x))
    for i, j in product(range(3), range(3)):
        patch = x[:, 2 * i : 2 * i + 2, j : j + 3].reshape(4, -1)
        np.testing.assert_allclose(y[:, i, j], np.maximum(patch @ kernel[i, j] + bias[i, j], 0))


def test_equal_kernels_make_a_convolution() -> None:
    import keras

    from labkit.models.unshared import LocallyConnected2D

    x = random.standard_normal((2, 6, 6, 3))
    convolution = keras.layers.Conv2D(4, 3, strides=2, dtype="float64")
    expected = np.asarray(convolution(x))
    layer = LocallyConnected2D(4, 3, 2, use_bias=False, dtype="float64")
    layer.build(x.shape)
    layer.kernel.assign(np.broadcast_to(convolution.kernel.numpy().reshape(-1, 4), (2, 2, 27, 4)))
    np.testing.assert_allclose(np.asarray(layer(x)), expected, atol=1e-12)


def test_a_model_is_saved_and_comes_back(tmp_path: Path) -> None:
    import keras

    shapes = datasets.check("digits", {})
    model = models.build("locally_connected", shapes, filters=[2, 3], kernel=2, activation="tanh")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    x = random.standard_normal((2, 8, 8, 1)).astype("float32")
    np.testing.assert_array_equal(model(x), again(x))
    places = [layer.get_config() for layer in again.layers[:2]]
    assert [(place["filters"], place["kernel_size"]) for place in places] == [
        (2, (2, 2)),
        (3, (2, 2)),
    ]
    # Glorot's limit uses the number of inputs and outputs of one place.
    assert 0.9 < np.abs(model.layers[0].kernel.numpy()).max() / (6 / (4 + 2)) ** 0.5 <= 1


@pytest.mark.parametrize(
    ("arguments", "shape", "sentence"),
    [
        ({"filters": 0}, (None, 4, 4, 1), "give numbers from 1"),
        ({"kernel_size": 5}, (None, 4, 4, 1), r"\(5, 5\) does not fit on an image of \(4, 4\)"),
        ({}, (None, None, 4, 1), "of a known size"),
    ],
)
def test_what_a_layer_cannot_be_is_refused(
    arguments: dict[str, Any], shape: tuple[int | None, ...], sentence: str
) -> None:
    from labkit.models.unshared import LocallyConnected2D

    with pytest.raises(InvalidInput, match=sentence):
        LocallyConnected2D(**{"filters": 2, "kernel_size": 3} | arguments).build(shape)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("locally_connected", {"filters": [2, 3], "kernel": 3, "stride": 2}),
        ("cnn", {"filters": [2, 3], "dense": 5}),
        ("mlp", {"widths": [5, 6]}),
        ("linear", {}),
    ],
)
def test_planes_are_those_of_the_model_that_keras_builds(
    name: str, options: dict[str, Any]
) -> None:
    import keras

    from labkit.model_parallel.tiles import cut

    keras.backend.clear_session()  # Keras then numbers the names of layers from the start
    shapes = datasets.check("digits", {})
    planes = models.grid_layers(name, options, shapes)
    model = models.build(name, shapes, **options)
    found = [piece.plane for piece in cut(model)]
    assert planes == [*found, GridLayer("loss", "loss", found[-1].shape, trains=False)]
    assert (1, *planes[-1].shape)[-1] == model.output_shape[-1]


@pytest.mark.parametrize(
    "layers",
    [
        "LocallyConnected2D(2, 3, activation='softmax')",
        "Conv2D(2, 3, dilation_rate=2)",
        "Conv2D(2, 3, kernel_regularizer='l2')",
        "Conv2D(2, 3, strides=4)",
        "Dense(3)",
        "Dropout(0.5)",
        "BatchNormalization()",
        "MaxPooling2D(padding='same')",
        "Activation('softmax')",
        "Activation('relu', activity_regularizer='l2')",
    ],
)
def test_what_cannot_be_cut_is_refused(layers: str) -> None:
    import keras

    from labkit.model_parallel.tiles import cut
    from labkit.models.unshared import LocallyConnected2D

    known = vars(keras.layers) | {"LocallyConnected2D": LocallyConnected2D}
    model = keras.Sequential([keras.Input((8, 8, 1)), eval(layers, known)])
    with pytest.raises(InvalidInput, match=r"allowed: (LocallyConnected2D, Conv2D|up to 3 × 3)"):
        cut(model)


def test_branches_and_inputs_of_an_unknown_size_are_refused() -> None:
    import keras
    from keras.layers import Add, Dense

    from labkit.model_parallel.tiles import cut

    inputs = keras.Input((6,))
    shared = Dense(6)
    with pytest.raises(InvalidInput, match="needs a chain of layers"):
        cut(keras.Model(inputs, Add()([Dense(3)(inputs), Dense(3)(inputs)])))
    with pytest.raises(InvalidInput, match="each called once"):
        cut(keras.Model(inputs, shared(shared(inputs))))
    with pytest.raises(InvalidInput, match="begin the model with keras"):
        cut(keras.Sequential([Dense(3)]))


def test_options_that_cannot_be_are_refused_before_keras() -> None:
    text = datasets.check("shakespeare", {})
    with pytest.raises(InvalidInput, match="stride=3 is impossible; allowed: distance between"):
        models.check("locally_connected", {"kernel": 2, "stride": 3})
    with pytest.raises(InvalidInput, match="at least \\[17, 17, channels\\]"):
        models.check(
            "locally_connected", {"filters": [1] * 8, "stride": 1}, datasets.check("digits", {})
        )
    with pytest.raises(InvalidInput, match="cannot predict the next character"):
        models.check("locally_connected", {}, text)
