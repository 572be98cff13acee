"""Test that quantized models are small and accurate, and that other layers are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from labkit import datasets, models
from labkit.common.errors import InvalidInput
from labkit.deployment import Quantize

DATA = datasets.load("digits", rows=64, test_rows=64)


@pytest.mark.parametrize(("mode", "most"), [("int8", 0.5 / 127), ("int4", 0.5 / 7.5)])
def test_no_weight_moves_by_more_than_half_a_step(mode: str, most: float, tmp_path: Path) -> None:
    import keras

    keras.utils.set_random_seed(0)
    model = models.build("mlp", DATA, widths=[64])
    kept = [weight.numpy() for weight in model.weights]
    method = Quantize(mode=mode)
    quantized = method.apply(model, DATA)
    assert quantized.what == f"100.0% of the kernel weights are quantized to {mode}"
    layer = quantized.model.layers[1]
    kernel = layer.kernel.numpy() if mode == "int4" else layer._kernel.numpy()
    assert kernel.dtype == np.int8
    method.write(quantized.model, tmp_path / "q.keras")
    x = np.eye(64, dtype=np.float32).reshape(64, 8, 8, 1)
    hidden = keras.Sequential([quantized.model.layers[0], layer])(x).numpy()
    before = np.maximum(kept[0], 0)  # outputs for unit vectors: rows of the kernel after relu
    span = np.ptp(kept[0], axis=0) / 2 if mode == "int4" else abs(kept[0]).max(axis=0)
    assert (abs(hidden - before) <= 1.1 * most * span + 1e-6).all()
    back = method.read(tmp_path / "q.keras")(DATA.x_test).numpy()
    assert np.array_equal(back, quantized.model(DATA.x_test).numpy())
    assert all((old == new.numpy()).all() for old, new in zip(kept, model.weights, strict=True))


def test_layers_that_keras_leaves_out_are_named() -> None:
    model = models.build("cnn", DATA, filters=[4], dense=16)
    what = Quantize(mode="int8").apply(model, DATA).what
    conv, dense = 3 * 3 * 4, 36 * 16 + 16 * 10
    assert what.startswith(
        f"{dense / (conv + dense):.1%} of the kernel weights are quantized to int8; not"
    )
    assert what.endswith("(Conv2D)")


def test_a_model_of_which_nothing_can_be_quantized_is_refused() -> None:
    import keras

    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(10, 3, name="only")]
    model = keras.Sequential([*layers, keras.layers.GlobalAveragePooling2D()])
    with pytest.raises(
        InvalidInput,
        match=r"only \(Conv2D\); give a model with layers of type Dense, EinsumDense or Emb",
    ):
        Quantize(mode="int4").apply(model, DATA)


def test_what_keras_refuses_is_refused_with_its_words() -> None:
    import keras

    layer = keras.layers.Dense(4, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), layer])
    with pytest.raises(InvalidInput, match=r"cannot quantize this model to int8: .*float16"):
        Quantize(mode="int8").apply(model, DATA)


def test_another_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'int8' or 'int4'"):
        Quantize(mode="int2")
